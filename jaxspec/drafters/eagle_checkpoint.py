"""Loads EAGLE drafters: the tensors of each variant, and the map of a draft vocabulary."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.eagle_config import EagleConfig, read_eagle_config
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models.config import ModelConfig
from jaxspec.weights.files import ModelFileError, StoredTensor
from jaxspec.weights.folder import weight_files
from jaxspec.weights.load import dtype_of, load_groups
from jaxspec.weights.mapping import HF_NAMES, Group, Piece, check
from jaxspec.weights.safetensors import open_safetensors

# How other tools spell the same tensors: SpecForge's layer, SGLang's older norms of the taps.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_OPTIONAL = tuple(
    name for name, field in EagleParams.__dataclass_fields__.items() if field.default is None
)


def load_eagle(folder: Path, target: ModelConfig, dtype: str) -> tuple[EagleConfig, EagleParams]:
    """Loads an EAGLE drafter for a target.

    An embedding or a head that the checkpoint holds is the drafter's own; where it holds none,
    the target's serves, which needs the target's width and vocabulary.

    Args:
        folder: the checkpoint.
        target: the model that it is to draft for.
        dtype: as the target's.

    Raises:
        ModelFileError: a config that does not fit the target, tensors that do not fit the config,
            or a map of the vocabulary that contradicts itself.
        ValueError: an unknown dtype.
    """
    config = read_eagle_config(folder, target)
    tensors = _canonical(open_safetensors(weight_files(folder)), folder)
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    _check_borrowed(config, tensors, target, folder)
    groups = eagle_groups(config, tensors)
    check(groups, tensors, ignored=HF_NAMES.ignored, source=folder)
    target_ids = _target_ids(maps, config, folder)
    arrays = load_groups(groups, tensors, dtype_of(dtype), optional=_OPTIONAL)
    (layer,) = arrays.pop("layers")
    if arrays["lm_head"] is None and config.tie_word_embeddings:
        arrays["lm_head"] = arrays["embed"]
    arrays["target_ids"] = None if target_ids is None else jnp.asarray(target_ids)
    return config, EagleParams(layer=layer, **arrays)


def _canonical(tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors under the names that `_groups` uses."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        for other, ours in _OTHER_NAMES.items():
            if plain.startswith(other):
                plain = ours + plain.removeprefix(other)
        if plain in renamed:
            raise ModelFileError(
                folder,
                f"{name} and {renamed[plain].name} are the same tensor",
                "remove the one that the drafter was not trained with",
            )
        renamed[plain] = tensor
    return renamed


def _check_borrowed(
    config: EagleConfig, tensors: Mapping[str, StoredTensor], target: ModelConfig, folder: Path
) -> None:
    """Refuses a drafter that lacks an embedding or a head for which the target's cannot serve."""
    remedy = "the checkpoint is incomplete, or was trained for another target"
    has_embed, has_head = (f"{name}.weight" in tensors for name in ("embed_tokens", "lm_head"))
    if not (has_embed and has_head) and config.hidden_size != target.hidden_size:
        raise ModelFileError(
            folder,
            f"borrows the target's {'head' if has_embed else 'embedding'}, but its hidden_size is "
            f"{config.hidden_size} and the target's {target.hidden_size}",
            remedy,
        )
    if not has_head and config.draft_vocab_size != config.vocab_size:
        raise ModelFileError(
            folder,
            f"has no lm_head.weight for its draft_vocab_size {config.draft_vocab_size}; the "
            f"target's head has {config.vocab_size} rows",
            remedy,
        )
    borrows_embedding_as_head = config.tie_word_embeddings and not (has_head or has_embed)
    if borrows_embedding_as_head and not target.tie_word_embeddings:
        raise ModelFileError(
            folder,
            "tie_word_embeddings is true and no embedding is stored, but the target's head is not "
            "its embedding",
            remedy,
        )


def eagle_groups(config: EagleConfig, stored: Container[str]) -> list[Group]:
    """The arrays of `EagleParams`; the embedding and the head where their names are stored."""
    width, inner, z = config.hidden_size, config.intermediate_size, config.input_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    stacked = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    layer = "layers.0."

    def whole(field: str, name: str, *shape: int) -> Group:
        return Group(field, None, shape, (Piece(name, shape),))

    def fused(field: str, part: str, kind: str, rows: dict[str, int], *columns: int) -> Group:
        pieces = tuple(
            Piece(f"{layer}{part}.{name}.{kind}", (count, *columns)) for name, count in rows.items()
        )
        return Group(field, 0, (sum(rows.values()), *columns), pieces)

    groups = [
        fused("qkv", "self_attn", "weight", stacked, z),
        fused("o", "self_attn", "weight", {"o_proj": width}, queries),
        fused("gate_up", "mlp", "weight", {"gate_proj": inner, "up_proj": inner}, width),
        fused("down", "mlp", "weight", {"down_proj": width}, inner),
        whole("post_norm", f"{layer}post_attention_layernorm.weight", width),
        whole("fc", "fc.weight", width, config.fc_size),
    ]
    if config.attention_bias:
        groups.append(fused("qkv_bias", "self_attn", "bias", stacked))
        groups.append(fused("o_bias", "self_attn", "bias", {"o_proj": width}))
    if config.fc_bias:
        groups.append(whole("fc_bias", "fc.bias", width))
    if config.has_taps:
        groups.append(whole("input_norm", f"{layer}input_layernorm.weight", width))
        groups.append(whole("hidden_norm", f"{layer}hidden_norm.weight", width))
        groups.append(whole("norm", "norm.weight", width))
    if config.qk_norm:
        groups.append(whole("q_norm", f"{layer}self_attn.q_norm.weight", config.head_dim))
        groups.append(whole("k_norm", f"{layer}self_attn.k_norm.weight", config.head_dim))
    if config.norm_before_fc:
        groups.append(whole("taps_norm", "input_norm.weight", config.fc_size))
    if config.fc_norm:
        taps, size = len(config.feature_layers), config.target_hidden_size
        pieces = tuple(Piece(f"fc_norm.{tap}.weight", (size,)) for tap in range(taps))
        groups.append(Group("fc_norms", None, (taps, size), pieces))
    if "embed_tokens.weight" in stored:
        groups.append(whole("embed", "embed_tokens.weight", config.vocab_size, width))
    if "lm_head.weight" in stored:
        groups.append(whole("lm_head", "lm_head.weight", config.draft_vocab_size, width))
    return groups


def _target_ids(
    maps: Mapping[str, StoredTensor], config: EagleConfig, folder: Path
) -> np.ndarray | None:
    """i32[V_draft] the target's id of each draft id, None where they are the same.

    `d2t` holds offsets: the target's id is d + d2t[d]. `t2d` marks the target's ids that occur.
    """
    draft, vocab = config.draft_vocab_size, config.vocab_size
    remedy = "the map of the vocabulary is not the drafter's, fetch the checkpoint again"
    for name, size in (("d2t", draft), ("t2d", vocab)):
        if name in maps and maps[name].shape != (size,):
            raise ModelFileError(
                folder, f"{name} has shape {maps[name].shape} instead of ({size},)", remedy
            )
    if "d2t" not in maps:
        if draft != vocab:
            raise ModelFileError(
                folder,
                f"has no d2t for its {draft} draft ids among the target's {vocab}",
                "fetch the checkpoint again",
            )
        return None
    ids = maps["d2t"].read().astype(np.int64) + np.arange(draft)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != draft:
        raise ModelFileError(
            folder,
            f"d2t maps {draft} draft ids to {len(np.unique(ids))} ids from {ids.min()} to "
            f"{ids.max()}, the target's are 0 to {vocab - 1}",
            remedy,
        )
    if "t2d" in maps:
        marked = np.flatnonzero(maps["t2d"].read())
        if not np.array_equal(marked, np.sort(ids)):
            raise ModelFileError(
                folder, f"t2d marks {len(marked)} ids that are not d2t's {draft}", remedy
            )
    return None if np.array_equal(ids, np.arange(vocab)) else ids.astype(np.int32)
