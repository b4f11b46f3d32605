"""Parses a drafter checkpoint's `config.json`: what it is, and whether it fits the target.

Host only. A drafter that loads but was meant for something else costs all acceptance without any
error, so whatever is not understood is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.models.config import Json, ModelConfig
from jaxspec.weights.config_json import (
    architecture_of,
    boolean,
    check_sizes,
    integer,
    number,
    parse_rope,
    read_json,
    refuse_quantization,
)
from jaxspec.weights.files import ModelFileError

log = logging.getLogger(__name__)

DEFAULT_MASK_TOKEN = "<|MASK|>"  # of z-lab's and SGLang's loaders
TokenId = Callable[[str], int | None]  # a tokenizer's id of a token's exact text

# Architecture -> key of `drafters.registry.DRAFTERS`.
_KINDS = {
    "DFlashDraftModel": "dflash",
    "LlamaForCausalLMEagle3": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "MultiLayerEagleDraftModel": "multi_layer_eagle",
}
_SPECULATORS = {"eagle3": "eagle3"}  # `speculators_model_type` -> key
_UNSUPPORTED = ("DFlash2", "Domino", "DSpark")  # as architectures name them
# Keys of `dflash_config`, or beside it, that turn DFlash into another network.
_VARIANTS = {
    "conv_kernel_size": "DFlash2",
    "conv_group_size": "DFlash2",
    "selector_rank": "DFlash2",
    "selector_top_k": "DFlash2",
    "gru_hidden_dim": "Domino",
    "emb_dim": "Domino",
    "pure_draft_prefix_len": "Domino",
}
# Position 0 of the block predicts, or labels are shifted: another layout of the block.
_LAYOUTS = ("sample_from_anchor", "shift_label")
# Factors in the network that jaxspec does not have, and the value that means "none".
_FACTORS: dict[str, Any] = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
}


def detect_drafter(folder: Path) -> str:
    """What a drafter checkpoint is, as a key of `drafters.registry.DRAFTERS`.

    Raises:
        ModelFileError: no config, or a kind of drafter that jaxspec does not run.
    """
    file = folder / "config.json"
    config = read_json(file)
    remedy = "jaxspec runs " + ", ".join(_KINDS) + ", `ngram` and `none`"
    if "speculators_model_type" in config or "speculators_config" in config:
        kind = config.get("speculators_model_type", "unnamed")
        if kind in _SPECULATORS:
            return _SPECULATORS[kind]
        raise ModelFileError(
            file, f"is in the layout of the speculators library ({kind}), not supported", remedy
        )
    architecture = architecture_of(config, file)
    if not isinstance(config.get("dflash_config") or {}, dict):
        raise ModelFileError(
            file, f"dflash_config is {config['dflash_config']!r}, not an object", "fetch it again"
        )
    if variant := _variant(config, architecture):
        raise ModelFileError(file, f"the drafter is {variant}, which is not supported", remedy)
    if architecture not in _KINDS:
        raise ModelFileError(file, f"{architecture} is not a drafter that jaxspec knows", remedy)
    return _KINDS[architecture]


def _variant(config: Json, architecture: str) -> str | None:
    nested = config.get("dflash_config") or {}
    for name in _UNSUPPORTED:
        if name.lower() in architecture.lower():
            return name
    projector = nested.get("projector_type", config.get("projector_type"))
    if projector is not None:
        return {"domino": "Domino", "dspark": "DSpark"}.get(str(projector).lower(), str(projector))
    return next(
        (name for key, name in _VARIANTS.items() if nested.get(key) or config.get(key)), None
    )


def read_dflash_config(
    folder: Path,
    target: ModelConfig,
    *,
    token_id: TokenId | None = None,
) -> DFlashConfig:
    """Parses a DFlash checkpoint's config and holds it against the target's.

    A key may stand at the top or in `dflash_config`, which wins (algorithm and keys: SGLang's and
    z-lab's loaders of DFlash, arXiv 2602.06036).

    Args:
        folder: the checkpoint.
        target: the model that it is to draft for.
        token_id: the target's tokenizer, for checkpoints that name the mask token by its text.

    Raises:
        ModelFileError: a missing or impossible value, a drafter made for another target, or a
            layout that jaxspec does not run.
    """
    file = folder / "config.json"
    if (kind := detect_drafter(folder)) != "dflash":
        raise ModelFileError(file, f"the drafter is {kind}, not dflash", "name a DFlash checkpoint")
    config = read_json(file)
    refuse_quantization(config, file)
    try:
        drafter = _parse(config, target, token_id)
    except KeyError as error:
        raise ModelFileError(
            file,
            f"key {error} is missing",
            "it cannot be guessed without losing acceptance, add it as the drafter was trained",
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelFileError(file, str(error), "the config is not one jaxspec can run") from None
    check_sizes(drafter, file)
    _check_fit(drafter, config, target, file)
    return drafter


def _parse(config: Json, target: ModelConfig, token_id: TokenId | None) -> DFlashConfig:
    nested = config.get("dflash_config") or {}
    d = {**config, **{key: value for key, value in nested.items() if value is not None}}
    for key in _LAYOUTS:
        if d.get(key):
            raise ValueError(
                f"{key} is {d[key]!r}: position 0 of the block predicts, "
                "while jaxspec's first prediction is position 1"
            )
    for key, neutral in _FACTORS.items():
        if d.get(key, neutral) not in (neutral, None):
            raise ValueError(f"{key} is {d[key]!r}, which is not supported")
    if (activation := d.get("hidden_act", "silu")) != "silu":  # HF's default
        raise ValueError(f"hidden_act is {activation!r}, only 'silu' is supported")
    theta, scaling = parse_rope(d, default_theta=None)
    num_layers, hidden_size = integer(d, "num_hidden_layers"), integer(d, "hidden_size")
    windows, causal = _layer_masks(d, num_layers)
    return DFlashConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=integer(d, "intermediate_size"),
        num_heads=integer(d, "num_attention_heads"),
        num_kv_heads=integer(d, "num_key_value_heads"),
        head_dim=integer(d, "head_dim"),
        rope_theta=theta,
        rms_norm_eps=number(d, "rms_norm_eps"),
        block_size=_block_size(config, nested),
        mask_token_id=_mask_token_id(d, target.vocab_size, token_id),
        target_layer_ids=_target_layer_ids(d, target.num_layers),
        layer_windows=windows,
        layer_causal=causal,
        max_position_embeddings=integer(d, "max_position_embeddings"),
        vocab_size=integer(d, "vocab_size"),
        # Only drafters of another width than the target's say it.
        target_hidden_size=integer(d, "target_hidden_size", hidden_size),
        rope_scaling=scaling,
        attention_bias=boolean(d, "attention_bias", False),  # HF's default
    )


def _check_fit(drafter: DFlashConfig, config: Json, target: ModelConfig, file: Path) -> None:
    nested = config.get("dflash_config") or {}
    trained_layers = nested.get("num_target_layers", config.get("num_target_layers"))
    pairs = [
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("target_hidden_size", drafter.target_hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ]
    if trained_layers is not None:  # older checkpoints leave it out
        pairs.append(("num_target_layers", trained_layers, target.num_layers))
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise ModelFileError(
                file,
                f"was trained for a target whose {key} is {ours}, this target's is {theirs}",
                "name the target it was trained for, or another drafter",
            )


def _block_size(config: Json, nested: Json) -> int:
    # The block counts the bonus token; tools that count drafts only call it by another name.
    trained = integer({**config, **nested}, "block_size")
    flat = config.get("block_size", trained)
    if flat != trained:
        log.warning(
            "block_size is %s in dflash_config and %s at the top; dflash_config's %s is used",
            trained,
            flat,
            trained,
        )
    if trained < 2:
        raise ValueError(f"block_size is {trained}, which leaves no room for a draft")
    return trained


def _mask_token_id(d: Json, vocab_size: int, token_id: TokenId | None) -> int:
    named = d.get("mask_token")
    looked_up = token_id(named or DEFAULT_MASK_TOKEN) if token_id is not None else None
    if d.get("mask_token_id") is None:
        if looked_up is None:
            raise ValueError(
                f"mask_token_id is missing, and the tokenizer has no token "
                f"{named or DEFAULT_MASK_TOKEN!r}"
            )
        mask = looked_up
    else:
        mask = integer(d, "mask_token_id")
        if named is not None and looked_up not in (None, mask):
            raise ValueError(
                f"mask_token_id is {mask}, but the tokenizer's id of {named!r} is {looked_up}"
            )
    if not 0 <= mask < vocab_size:
        raise ValueError(
            f"mask_token_id is {mask}, outside the target's vocabulary of {vocab_size}"
        )
    return mask


def _target_layer_ids(d: Json, num_layers: int) -> tuple[int, ...]:
    ids = d["target_layer_ids"]
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise ValueError(f"target_layer_ids is {ids!r}, not a list of layers")
    for layer in ids:
        if not 0 <= layer < num_layers:
            raise ValueError(
                f"target_layer_ids has {layer}, the target's layers are 0 to {num_layers - 1}"
            )
    return tuple(ids)


def _layer_masks(d: Json, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """What each layer may see: its window, and whether it is causal inside the block.

    Without `is_causal`, sliding layers are causal and full layers are not (z-lab's model.py).
    """
    window = d.get("sliding_window")
    switched_off = d.get("use_sliding_window") is False
    types = d.get("layer_types")
    if types is None:
        # transformers' Qwen3Config: windows are off unless switched on, and start at a layer.
        first = integer(d, "max_window_layers", 28) if d.get("use_sliding_window") else num_layers
        types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if unknown or len(types) != num_layers:
        raise ValueError(f"layer_types is {types!r}, not the kinds of {num_layers} layers")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding):
        if switched_off:
            raise ValueError("layer_types has sliding_attention, but use_sliding_window is false")
        if integer(d, "sliding_window") < 1:
            raise ValueError(f"sliding_window is {window}, below 1")
    causal = d.get("is_causal")
    return (
        tuple(window if slides else None for slides in sliding),
        tuple(slides if causal is None else boolean(d, "is_causal") for slides in sliding),
    )
