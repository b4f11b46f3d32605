"""Loads multi-layer EAGLE drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxspec.drafters.multi_layer_eagle_config import (
    MultiLayerEagleConfig,
    read_multi_layer_eagle_config,
)
from jaxspec.drafters.multi_layer_eagle_params import MultiLayerEagleParams
from jaxspec.models.config import ModelConfig
from jaxspec.weights.folder import weight_files
from jaxspec.weights.load import dtype_of, load_groups
from jaxspec.weights.mapping import HF_NAMES, Group, Piece, check, decoder_groups
from jaxspec.weights.safetensors import open_safetensors

_PREFIX = "model.mtp.layers.{}."  # as MiMo-V2 names them
_OWN = {  # field -> tensor of each layer
    "embed_norms": "enorm",
    "hidden_norms": "hnorm",
    "norms": "final_layernorm",
}


def load_multi_layer_eagle(
    folder: Path, target: ModelConfig, dtype: str
) -> tuple[MultiLayerEagleConfig, MultiLayerEagleParams]:
    """Loads a multi-layer EAGLE drafter for a target.

    Args:
        folder: the checkpoint.
        target: the model that it is to draft for.
        dtype: as the target's.

    Raises:
        ModelFileError: a config that does not fit the target, or tensors that do not fit the
            config, an embedding or a head of its own among them.
        ValueError: an unknown dtype.
    """
    config = read_multi_layer_eagle_config(folder, target)
    tensors = open_safetensors(weight_files(folder))
    groups = _groups(config)
    check(groups, tensors, ignored=HF_NAMES.ignored, source=folder)
    arrays = load_groups(groups, tensors, dtype_of(dtype), optional=("q_norms", "k_norms"))
    return config, MultiLayerEagleParams(**arrays)


def _groups(config: MultiLayerEagleConfig) -> list[Group]:
    def stacked(field: str, name: str, *shape: int) -> Group:
        names = [f"{_PREFIX.format(layer)}{name}.weight" for layer in range(config.num_layers)]
        pieces = tuple(Piece(each, shape) for each in names)
        return Group(field, None, (config.num_layers, *shape), pieces)

    width = config.hidden_size
    own = [stacked(field, name, width) for field, name in _OWN.items()]
    own.append(stacked("mixes", "eh_proj", width, 2 * width))
    names = replace(HF_NAMES, layer=_PREFIX)
    return [*own, *decoder_groups(config, names, qk_norm=config.qk_norm)]
