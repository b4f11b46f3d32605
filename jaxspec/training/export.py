"""Writes a trained drafter as others store it: config.json, model.safetensors and a card.

DFlash as z-lab has it, EAGLE-3 as SpecForge and SGLang have it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.drafters.eagle_checkpoint import eagle_groups
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.layers import LayerParams
from jaxspec.training.config import TrainingError
from jaxspec.weights.mapping import Group, dflash_groups

DTYPE = ml_dtypes.bfloat16


def export_drafter(
    folder: Path,
    params: DFlashParams | EagleParams,
    config: DFlashConfig | EagleConfig,
    target: ModelConfig,
    *,
    card: str,
) -> None:
    """Writes config.json, model.safetensors (bfloat16) and README.md, all of them or none.

    Files of the same names are replaced.

    Raises:
        TrainingError: the folder cannot be written.
    """
    staging = folder / ".writing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        if isinstance(config, EagleConfig):
            tensors, keys = eagle_tensors(params, config), eagle_checkpoint_config(config, target)
        else:
            tensors, keys = tensors_of(params, config), checkpoint_config(config, target)
        save_file(tensors, staging / "model.safetensors", {"format": "pt"})
        text = json.dumps(keys, indent=2) + "\n"
        (staging / "config.json").write_text(text)
        (staging / "README.md").write_text(card)
        for name in ("model.safetensors", "README.md", "config.json"):
            os.replace(staging / name, folder / name)
    except OSError as error:
        raise TrainingError(
            f"the drafter cannot be written to {folder} ({error.strerror}); free some space or "
            "choose another output, and run again with --resume"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def tensors_of(params: DFlashParams, config: DFlashConfig) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by name, in bfloat16: the loader's table read backwards."""
    groups = dflash_groups(
        config,
        num_features=len(config.target_layer_ids),
        target_width=config.target_hidden_size,
        prefix="",
    )
    return _split(groups, params, params.layers)


def eagle_tensors(params: EagleParams, config: EagleConfig) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by name, the maps between draft ids and the target's included.

    `d2t` holds offsets: the target's id is d + d2t[d].
    """
    tensors = _split(eagle_groups(config, ("lm_head.weight",)), params, (params.layer,))
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    ids = np.asarray(params.target_ids, np.int64)
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    return tensors


def _split(
    groups: Sequence[Group], params: Any, layers: Sequence[LayerParams]
) -> dict[str, np.ndarray]:
    """The loader's table read backwards, in bfloat16."""
    tensors = {}
    for group in groups:
        owner = params if group.layer is None else layers[group.layer]
        flat = np.asarray(getattr(owner, group.field)).astype(DTYPE).reshape(-1)
        start = 0
        for piece in group.pieces:
            size = math.prod(piece.shape)
            tensors[piece.name] = flat[start : start + size].reshape(piece.shape)
            start += size
    return tensors


def eagle_checkpoint_config(config: EagleConfig, target: ModelConfig) -> dict[str, Any]:
    """The keys of an EAGLE-3 config.json, as SpecForge writes them."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": config.attention_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_aux_hidden_states": len(config.feature_layers),
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        "rope_theta": config.rope_theta,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def checkpoint_config(config: DFlashConfig, target: ModelConfig) -> dict[str, Any]:
    """The keys of a DFlash config.json, as z-lab's checkpoints have them."""
    windows = {window for window in config.layer_windows if window is not None}
    assert len(windows) <= 1, "config.json has one sliding_window for all layers"
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in config.layer_windows
        ],
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        "rope_theta": config.rope_theta,
        "sliding_window": min(windows, default=None),
        "tie_word_embeddings": target.tie_word_embeddings,
        "use_sliding_window": bool(windows),
        "vocab_size": config.vocab_size,
    }


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
