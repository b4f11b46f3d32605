"""Which tensors of a checkpoint fill which array: one strict table per kind of network.

An array is a `Group`: its pieces, one below the other. Fused matrices (q, k and v; gate and up)
and stacked norms are the same thing. To load another network, write its groups here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxspec.models.config import ModelConfig
from jaxspec.weights.config_json import DecoderSizes
from jaxspec.weights.files import ModelFileError, StoredTensor

MAX_NAMED = 8  # names of one kind in an error


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file, or a run of rows of an array."""

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # > 0: rows of so many heads in pairwise rotary order


@dataclass(frozen=True, slots=True)
class Group:
    """An array of the parameters: pieces concatenated along the first axis, then reshaped."""

    field: str
    layer: int | None  # None: a field of the parameters, else of `layers[layer]`
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a file format spells the tensors of a decoder."""

    embed: str
    lm_head: str
    final_norm: str
    layer: str  # prefix, with {} for the layer
    input_norm: str
    post_norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str
    k_norm: str
    gate: str
    up: str
    down: str
    interleaved_rotary: bool = False
    ignored: str = "(?!)"  # pattern of names whose content follows from the config


HF_NAMES = TensorNames(
    embed="model.embed_tokens",
    lm_head="lm_head",
    final_norm="model.norm",
    layer="model.layers.{}.",
    input_norm="input_layernorm",
    post_norm="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    # Rotary tables that old versions of transformers saved.
    ignored=r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",
)
GGUF_NAMES = TensorNames(
    embed="token_embd",
    lm_head="output",
    final_norm="output_norm",
    layer="blk.{}.",
    input_norm="attn_norm",
    post_norm="ffn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    ignored=r"rope_freqs\.weight",  # becomes ModelConfig.rope_scaling
)


def target_groups(config: ModelConfig, names: TensorNames) -> tuple[Group, ...]:
    """The arrays of `TargetParams`."""
    vocab, width = config.vocab_size, config.hidden_size
    groups = [  # the vocabulary first: the largest buffer, while little else is resident
        _single("embed", names.embed + ".weight", (vocab, width)),
        _single("final_norm", names.final_norm + ".weight", (width,)),
    ]
    if not config.tie_word_embeddings:
        groups.append(_single("lm_head", names.lm_head + ".weight", (vocab, width)))
    return (*groups, *decoder_groups(config, names, qk_norm=config.qk_norm))


def dflash_groups(
    config: DecoderSizes, *, num_features: int, target_width: int, prefix: str
) -> tuple[Group, ...]:
    """The arrays of `DFlashParams`; names as z-lab stores them, `prefix` "" or "model."."""
    width = config.hidden_size
    groups = (
        _single("fc", f"{prefix}fc.weight", (width, num_features * target_width)),
        _single("hidden_norm", f"{prefix}hidden_norm.weight", (width,)),
        _single("norm", f"{prefix}norm.weight", (width,)),
    )
    names = replace(HF_NAMES, layer=prefix + "layers.{}.")
    return (*groups, *decoder_groups(config, names, qk_norm=True))


def check(
    groups: Sequence[Group],
    tensors: Mapping[str, StoredTensor],
    *,
    ignored: str,
    source: Path,
) -> None:
    """Holds the table against the file: every tensor is used once, or named here.

    Raises:
        ModelFileError: tensors are missing, left over, or have another shape.
    """
    pieces = {piece.name: piece for group in groups for piece in group.pieces}
    missing = [name for name in pieces if name not in tensors]
    left_over = [n for n in tensors if n not in pieces and not re.fullmatch(ignored, n)]
    misshapen = [
        f"{name} {tensors[name].shape} instead of {piece.shape}"
        for name, piece in pieces.items()
        if name in tensors and tensors[name].shape != piece.shape
    ]
    faults = [
        f"{kind} {_enumerate(found)}"
        for kind, found in (
            ("missing:", missing),
            ("not expected:", left_over),
            ("of another shape:", misshapen),
        )
        if found
    ]
    if faults:
        raise ModelFileError(
            source,
            "the tensors are not those that the config asks for, " + "; ".join(faults),
            "check that config and weights belong together and are complete",
        )


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def _single(field: str, name: str, shape: tuple[int, ...]) -> Group:
    return Group(field, None, shape, (Piece(name, shape),))


def decoder_groups(config: DecoderSizes, names: TensorNames, *, qk_norm: bool) -> list[Group]:
    """The arrays of a stack of decoder layers: its norms, and the matrices of each layer."""
    groups = [
        _stacked("input_norms", names.input_norm, config.hidden_size, config, names),
        _stacked("post_norms", names.post_norm, config.hidden_size, config, names),
    ]
    if qk_norm:
        groups += [
            _stacked("q_norms", names.q_norm, config.head_dim, config, names),
            _stacked("k_norms", names.k_norm, config.head_dim, config, names),
        ]
    for layer in range(config.num_layers):
        groups += _layer_groups(config, names, layer)
    return groups


def _stacked(field: str, stem: str, width: int, config: DecoderSizes, names: TensorNames) -> Group:
    pieces = tuple(
        Piece(f"{names.layer.format(layer)}{stem}.weight", (width,))
        for layer in range(config.num_layers)
    )
    return Group(field, None, (config.num_layers, width), pieces)


def _layer_groups(config: DecoderSizes, names: TensorNames, layer: int) -> list[Group]:
    width, inner = config.hidden_size, config.intermediate_size
    query_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    prefix = names.layer.format(layer)

    def fused(field: str, kind: str, columns: tuple[int, ...], *parts: tuple[str, int, int]):
        pieces = tuple(
            Piece(f"{prefix}{stem}.{kind}", (rows, *columns), heads) for stem, rows, heads in parts
        )
        return Group(field, layer, (sum(rows for _, rows, _ in parts), *columns), pieces)

    interleaved = names.interleaved_rotary
    qkv = (
        (names.q, query_rows, config.num_heads * interleaved),
        (names.k, kv_rows, config.num_kv_heads * interleaved),
        (names.v, kv_rows, 0),
    )
    groups = [
        fused("qkv", "weight", (width,), *qkv),
        fused("o", "weight", (query_rows,), (names.o, width, 0)),
        fused("gate_up", "weight", (width,), (names.gate, inner, 0), (names.up, inner, 0)),
        fused("down", "weight", (inner,), (names.down, width, 0)),
    ]
    if config.attention_bias:
        groups += [
            fused("qkv_bias", "bias", (), *qkv),
            fused("o_bias", "bias", (), (names.o, width, 0)),
        ]
    return groups
