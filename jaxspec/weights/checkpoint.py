"""A model's files, opened: its config, its tensors by name, and where its tokenizer is. Host only.

Opening reads headers only, so sizes and memory can be planned before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.weights.config_json import read_model_config
from jaxspec.weights.files import ModelFileError, StoredTensor
from jaxspec.weights.folder import ModelFiles
from jaxspec.weights.mapping import HF_NAMES, TensorNames
from jaxspec.weights.safetensors import open_safetensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A language model whose headers have been read and believed."""

    name: str  # what the user called it
    path: Path  # named in errors
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    names: TensorNames
    tokenizer_source: Path | dict[str, Any]  # folder with tokenizer.json, or GGUF metadata


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Reads config and headers of a model.

    Raises:
        ModelFileError: a file is missing, truncated or corrupt, or the model is not supported.
    """
    try:
        return _open(files)
    except OSError as error:
        raise ModelFileError(
            error.filename or files.folder, f"cannot be read ({error.strerror})", "check the file"
        ) from None


def _open(files: ModelFiles) -> Checkpoint:
    if files.gguf is not None:
        return _open_gguf(files.name, files.gguf)
    config = read_model_config(files.folder)
    tensors = open_safetensors(files.weights)
    return Checkpoint(files.name, files.folder, config, tensors, HF_NAMES, files.folder)


def _open_gguf(name: str, path: Path) -> Checkpoint:
    try:
        from jaxspec.weights.gguf import open_gguf
        from jaxspec.weights.gguf_config import gguf_model_config, gguf_names
    except ModuleNotFoundError as error:
        raise ModelFileError(
            path, f"needs {error.name}, which is not installed", "pip install gguf"
        ) from None
    file = open_gguf(path)
    config = gguf_model_config(file)
    return Checkpoint(name, path, config, file.tensors, gguf_names(file), file.metadata)
