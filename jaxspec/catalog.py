"""What jaxspec can run by name, and what of it is on this machine. Host only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from jaxspec.weights.config_json import PARSERS
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.folder import weight_files
from jaxspec.weights.hub import ALIASES, DEFAULT_MODEL, Alias
from jaxspec.weights.wheel import present_gguf


@dataclass(frozen=True, slots=True)
class Entry:
    """A model with a short name.

    cached: the file or folder that a start would use without a network; None where there is none.
    """

    name: str
    repo: str
    default: bool
    cached: str | None


def list_models(cache_dir: Path) -> list[Entry]:
    """The models with short names, the default one first."""
    return [
        Entry(name, alias.repo, name == DEFAULT_MODEL, _cached(alias, cache_dir))
        for name, alias in ALIASES.items()
    ]


def describe(cache_dir: Path) -> dict[str, Any]:
    """Models, architectures and drafters, as `jaxspec models --json` prints them."""
    from jaxspec.drafters.registry import DRAFTERS

    return {
        "cache_dir": str(cache_dir),
        "models": [asdict(entry) for entry in list_models(cache_dir)],
        "architectures": sorted(PARSERS),
        "drafters": ["auto", *DRAFTERS],
    }


def _cached(alias: Alias, cache_dir: Path) -> str | None:
    if alias.wheel is not None:
        gguf = present_gguf(alias.wheel, cache_dir=cache_dir)
        if gguf is not None:
            return str(gguf)
    config = try_to_load_from_cache(alias.repo, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        weight_files(folder)
    except ModelFileError:
        return None
    return str(folder)
