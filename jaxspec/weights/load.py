"""Streams a checkpoint's tensors into device arrays, one array of the parameters at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, TargetParams
from jaxspec.weights.checkpoint import Checkpoint
from jaxspec.weights.drafter_json import TokenId, detect_drafter, read_dflash_config
from jaxspec.weights.files import ModelFileError, Progress, StoredTensor, no_progress
from jaxspec.weights.folder import weight_files
from jaxspec.weights.mapping import HF_NAMES, Group, check, dflash_groups, target_groups
from jaxspec.weights.safetensors import open_safetensors

__all__ = ["DTYPES", "detect_drafter", "dtype_of", "load_dflash", "load_groups", "load_target"]

log = logging.getLogger(__name__)

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
Put = Callable[[np.ndarray], jax.Array]  # host buffer -> device array
DRAFTER_VOCABULARY = {  # tensors that make a drafter one with a vocabulary of its own
    "lm_head.weight": "an output head",
    "embed_tokens.weight": "an embedding",
    "d2t": "a map from its vocabulary to the target's",
    "t2d": "a map from the target's vocabulary to its own",
}
_ALIGNMENT = 64  # jax on CPU takes over host memory so aligned, and copies any other


def load_target(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    put: Put = jax.device_put,
    progress: Progress = no_progress,
) -> TargetParams:
    """Loads a language model; beside what is on the device already, one array is in memory.

    Args:
        checkpoint: an opened checkpoint.
        dtype: "float32", "bfloat16" or "float16", of every array.
        put: moves a filled buffer to the device; it may keep the memory, nobody else does.
        progress: told the parameters loaded so far.

    Raises:
        ModelFileError: tensors are missing, left over, misshapen or unreadable.
        ValueError: an unknown dtype.
    """
    groups = target_groups(checkpoint.config, checkpoint.names)
    ignored = _ignored_names(checkpoint)
    check(groups, checkpoint.tensors, ignored=ignored, source=checkpoint.path)
    return TargetParams(
        **load_groups(
            groups,
            checkpoint.tensors,
            dtype_of(dtype),
            optional=("lm_head", "q_norms", "k_norms"),
            put=put,
            progress=progress,
        )
    )


def load_dflash(
    folder: Path,
    target: ModelConfig,
    dtype: str,
    *,
    token_id: TokenId | None = None,
    put: Put = jax.device_put,
    progress: Progress = no_progress,
) -> tuple[DFlashConfig, DFlashParams]:
    """Loads a DFlash drafter for a target.

    Args:
        folder: the checkpoint.
        target: the model that it is to draft for.
        dtype: as the target's.
        token_id: the target's tokenizer, for checkpoints that name the mask token by its text.
        put: as in `load_target`.
        progress: as in `load_target`.

    Raises:
        ModelFileError: a config that does not fit the target, or tensors that do not fit the
            config; a drafter with an output head of its own is refused, since the target's would
            silently take its place.
        ValueError: an unknown dtype.
    """
    config = read_dflash_config(folder, target, token_id=token_id)
    tensors = open_safetensors(weight_files(folder))
    prefix = "model." if "model.fc.weight" in tensors else ""
    for name, meaning in DRAFTER_VOCABULARY.items():
        for spelled in (name, prefix + name):
            if spelled in tensors:
                raise ModelFileError(
                    folder,
                    f"has {spelled} {tensors[spelled].shape}, {meaning}, while DFlash drafts "
                    f"with the target's embedding and head of {target.vocab_size} rows",
                    "use a drafter without it",
                )
    groups = dflash_groups(
        config,
        num_features=len(config.target_layer_ids),
        target_width=config.target_hidden_size,
        prefix=prefix,
    )
    check(groups, tensors, ignored=HF_NAMES.ignored, source=folder)
    arrays = load_groups(groups, tensors, dtype_of(dtype), put=put, progress=progress)
    return config, DFlashParams(**arrays)


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}; choose one of them.")
    return DTYPES[name]


def _ignored_names(checkpoint: Checkpoint) -> str:
    """Pattern of tensors that may be left over: derived buffers, and a tied model's copied head."""
    names, tensors = checkpoint.names, checkpoint.tensors
    head, embed = names.lm_head + ".weight", names.embed + ".weight"
    if not checkpoint.config.tie_word_embeddings or not {head, embed} <= tensors.keys():
        return names.ignored
    # Which of the two is meant cannot be known, and the wrong one costs all acceptance silently.
    if not _same_values(tensors[head], tensors[embed]):
        raise ModelFileError(
            checkpoint.path,
            f"tie_word_embeddings is true, yet {head} differs from {embed}",
            "set tie_word_embeddings to false in config.json to use the stored head, "
            "or remove that tensor",
        )
    log.info("%s: %s repeats %s and is not loaded", checkpoint.name, head, embed)
    return f"{names.ignored}|{re.escape(head)}"


def _same_values(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    pairs = zip(first.chunks(), second.chunks(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def load_groups(
    groups: Sequence[Group],
    tensors: Mapping[str, StoredTensor],
    dtype: np.dtype,
    *,
    optional: tuple[str, ...] = (),
    put: Put = jax.device_put,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Fills every group; gives the fields of a params dataclass, `layers` among them.

    optional: fields that are None where no group fills them. The others are as in `load_target`.
    """
    total = sum(math.prod(group.shape) for group in groups)
    done = 0
    whole: dict[str, Any] = dict.fromkeys(optional)
    layers: dict[int, dict[str, jax.Array]] = {}
    for group in groups:
        progress("loading weights", done, total)
        owner = whole if group.layer is None else layers.setdefault(group.layer, {})
        # Waiting keeps the host buffers of an asynchronous copy from piling up.
        owner[group.field] = put(_fill(group, tensors, dtype)).block_until_ready()
        done += math.prod(group.shape)
    progress("loading weights", done, total)
    whole["layers"] = tuple(LayerParams(**layers[index]) for index in sorted(layers))
    return whole


def _fill(group: Group, tensors: Mapping[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
    """Reads a group into a fresh buffer, read-only from then on since a device may own it."""
    size = math.prod(group.shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    flat = memory[start : start + size].view(dtype)
    position = 0
    for piece in group.pieces:
        stop = position + math.prod(piece.shape)
        part = flat[position:stop].reshape(piece.shape)
        tensors[piece.name].read_into(part)
        if piece.interleaved_heads:
            part[:] = rotate_half_order(part, piece.interleaved_heads)
        position = stop
    buffer = flat.reshape(group.shape)
    buffer.flags.writeable = False
    return buffer


def rotate_half_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of q and k rows for pairwise rotation.

    Within a head of 4 rows, pairs (0, 1) and (2, 3) rotate together in the file; rotate-half
    rotates (0, 2) and (1, 3), so rows 0 1 2 3 of the file become rows 0 2 1 3.

    Args:
        rows: [heads * D, ...].
        num_heads: how many heads the rows hold.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
