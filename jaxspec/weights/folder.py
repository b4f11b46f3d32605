"""What a model folder holds, in the layout of Hugging Face. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jaxspec.weights.files import ModelFileError
from jaxspec.weights.json_fields import read_json

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


def folder_files(name: str, folder: Path) -> ModelFiles:
    """The files of a model folder.

    Raises:
        ModelFileError: no model, a LoRA adapter, or weights that are missing or ambiguous.
    """
    if (folder / "config.json").exists():
        return ModelFiles(name, folder, weight_files(folder))
    if (folder / "adapter_config.json").exists():
        raise ModelFileError(
            folder, "is a LoRA adapter, which is not supported", "merge it into its base model"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) > 1:
        found = ", ".join(path.name for path in ggufs)
        raise ModelFileError(folder, f"holds {len(ggufs)} GGUF files ({found})", "name one")
    if not ggufs:
        raise ModelFileError(
            folder, "has no config.json and no .gguf file", "name the folder of a model"
        )
    return ModelFiles(name, folder, (ggufs[0],))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: those of the index, else the only one.

    Raises:
        ModelFileError: none, several without an index, or shards that are missing.
    """
    if (folder / "adapter_model.safetensors").exists():
        raise ModelFileError(
            folder, "holds a LoRA adapter, which is not supported", "merge it into its base model"
        )
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
    found = tuple(sorted(folder.glob("*.safetensors")))
    if len(found) > 1:
        raise ModelFileError(
            folder,
            f"has {len(found)} safetensors files and no {INDEX}",
            "fetch the index, or leave only the model's file",
        )
    if not found and any(folder.glob("*.bin")):
        raise ModelFileError(
            folder,
            "has only .bin weights, which can run code when loaded",
            "convert them to safetensors",
        )
    if not found:
        raise ModelFileError(folder, "has no safetensors file", "fetch the weights")
    return found


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
