"""What an EAGLE checkpoint says about a drafter, parsed once into a hashable value. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.models.config import Json, ModelConfig, RopeScaling
from jaxspec.weights.config_json import (
    boolean,
    check_sizes,
    integer,
    number,
    parse_rope,
    read_json,
    refuse_quantization,
)
from jaxspec.weights.drafter_json import detect_drafter
from jaxspec.weights.files import ModelFileError

_KINDS = ("eagle", "eagle3")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and constants of an EAGLE drafter: one decoder layer over features and tokens.

    With taps it is an EAGLE-3 drafter, which projects the outputs of several target layers to its
    own width. Without, it is EAGLE-1 or 2, which reads what the target's head reads, has the
    target's width and drafts with the target's head.
    """

    has_taps: bool
    hidden_size: int  # E of the drafter
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int  # of its training
    vocab_size: int  # the target's
    draft_vocab_size: int  # ids that it drafts from
    target_hidden_size: int  # width of one tap
    feature_layers: tuple[int, ...]  # 0-based target layers whose outputs it reads, in order
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    window: int | None = None  # positions its layer looks back over; None sees all
    norm_before_residual: bool = False  # the residual starts from the normed features
    norm_before_fc: bool = False  # all taps together are normed
    fc_norm: bool = False  # each tap is normed
    norm_output: bool = False  # the next pass reads the normed output
    tie_word_embeddings: bool = False  # a head that is not stored is the embedding
    num_layers: int = 1

    @classmethod
    def like(
        cls, target: ModelConfig, *, draft_vocab_size: int, feature_layers: tuple[int, ...]
    ) -> EagleConfig:
        """An EAGLE-3 drafter of the target's own proportions (arXiv 2503.01840)."""
        return cls(
            **target.proportions(),
            has_taps=True,
            draft_vocab_size=draft_vocab_size,
            feature_layers=feature_layers,
        )

    @property
    def input_size(self) -> int:
        """Width of what q, k and v are projected from."""
        return 2 * self.hidden_size if self.has_taps else self.hidden_size

    @property
    def fc_size(self) -> int:
        """Width of what `fc` projects: the taps side by side, or embedding and feature."""
        if self.has_taps:
            return len(self.feature_layers) * self.target_hidden_size
        return 2 * self.hidden_size


def read_eagle_config(folder: Path, target: ModelConfig) -> EagleConfig:
    """Parses an EAGLE checkpoint's config and holds it against the target's.

    Reads the layouts of SGLang and SpecForge (keys at the top and in `eagle_config`) and of
    vLLM's speculators library (the layer's keys in `transformer_layer_config`).

    Raises:
        ModelFileError: a missing or impossible value, a drafter made for another target, or a
            variant that jaxspec does not run.
    """
    file = folder / "config.json"
    kind = detect_drafter(folder)
    if kind not in _KINDS:
        raise ModelFileError(file, f"the drafter is {kind}, not EAGLE", "name an EAGLE checkpoint")
    config = read_json(file)
    refuse_quantization(config, file)
    try:
        flat = _flatten(config)
        drafter = _parse(flat, target, has_taps=kind == "eagle3")
    except KeyError as error:
        raise ModelFileError(
            file,
            f"key {error} is missing",
            "it cannot be guessed without losing acceptance, add it as the drafter was trained",
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelFileError(file, str(error), "the config is not one jaxspec can run") from None
    check_sizes(drafter, file)
    _check_fit(drafter, flat, target, file)
    return drafter


def _flatten(config: Json) -> Json:
    """One dictionary of a config whose layer or EAGLE keys stand in a dictionary of their own."""
    layer, eagle = (config.get(key) or {} for key in ("transformer_layer_config", "eagle_config"))
    for name, nested in (("transformer_layer_config", layer), ("eagle_config", eagle)):
        if not isinstance(nested, dict):
            raise ValueError(f"{name} is {nested!r}, not an object")
    own = {key: value for key, value in config.items() if value is not None}
    # The two places of the tap ids count differently, so the nested one keeps its own name.
    taps = eagle.get("eagle_aux_hidden_state_layer_ids")
    nested = {k: v for k, v in eagle.items() if k != "eagle_aux_hidden_state_layer_ids"}
    qk_norm = layer.get("model_type") == "qwen3"
    return {**layer, **own, **nested, "nested_tap_ids": taps, "qk_norm": qk_norm}


def _parse(d: Json, target: ModelConfig, *, has_taps: bool) -> EagleConfig:
    for key, only in (("hidden_act", "silu"), ("mlp_bias", False), ("use_aux_hidden_state", True)):
        if (value := d.get(key, only)) != only:
            raise ValueError(f"{key} is {value!r}, only {only!r} is supported")
    if (num_layers := integer(d, "num_hidden_layers")) != 1:
        raise ValueError(f"num_hidden_layers is {num_layers}, an EAGLE drafter has 1")
    hidden_size, num_heads = integer(d, "hidden_size"), integer(d, "num_attention_heads")
    theta, scaling = parse_rope(d, default_theta=10_000.0)  # left out by drafters of Llama 2
    vocab_size = integer(d, "vocab_size")
    draft_vocab_size = integer(d, "draft_vocab_size", vocab_size) if has_taps else vocab_size
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}, of vocab_size {vocab_size} it can be 1 to all"
        )
    flags = {key: has_taps and boolean(d, key, False) for key in _FLAGS}
    flags["fc_norm"] |= has_taps and boolean(d, "use_aux_norm", False)  # its older name
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("norm_before_fc and fc_norm are both true, a drafter has one of them")
    return EagleConfig(
        has_taps=has_taps,
        hidden_size=hidden_size,
        intermediate_size=integer(d, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=integer(d, "num_key_value_heads", num_heads),
        head_dim=integer(d, "head_dim", hidden_size // num_heads),
        rope_theta=theta,
        rms_norm_eps=number(d, "rms_norm_eps"),
        max_position_embeddings=integer(d, "max_position_embeddings"),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=integer(d, "target_hidden_size", hidden_size),
        feature_layers=_feature_layers(d, target) if has_taps else (target.num_layers,),
        rope_scaling=scaling,
        attention_bias=boolean(d, "attention_bias", False),  # HF's default
        qk_norm=d["qk_norm"],
        fc_bias=boolean(d, "bias", not has_taps),  # the defaults of EAGLE's and SGLang's modules
        window=_window(d),
        # EAGLE-1 and 2 repeat the target's key; their head is the target's in any case.
        tie_word_embeddings=has_taps and boolean(d, "tie_word_embeddings", False),
        **flags,
    )


def _feature_layers(d: Json, target: ModelConfig) -> tuple[int, ...]:
    """The taps as 0-based layers whose outputs are read.

    Ids in `eagle_config` mean just that (SGLang, SpecForge). Ids at the top are entries of
    Hugging Face's tuple of hidden states, one more (vLLM, speculators). Without either, all engines
    tap the inputs of layers 2, L // 2 and L - 3.
    """
    last = target.num_layers - 1
    nested, flat = d["nested_tap_ids"], d.get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        layers = _layer_ids("eagle_config.eagle_aux_hidden_state_layer_ids", nested, 0, last)
    elif flat is not None:
        ids = _layer_ids("eagle_aux_hidden_state_layer_ids", flat, 1, last + 1)
        layers = tuple(layer - 1 for layer in ids)
    else:
        layers = (1, target.num_layers // 2 - 1, target.num_layers - 4)
        if not layers[0] < layers[1] < layers[2]:
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids is missing, and its default needs 7 layers or "
                f"more, the target has {target.num_layers}"
            )
    wanted = integer(d, "num_aux_hidden_states", len(layers))
    if wanted != len(layers):
        raise ValueError(f"num_aux_hidden_states is {wanted}, but there are {len(layers)} taps")
    return layers


def _layer_ids(key: str, ids: Any, first: int, last: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise ValueError(f"{key} is {ids!r}, not a list of layers")
    for layer in ids:
        if not first <= layer <= last:
            raise ValueError(f"{key} has {layer}, of this target it can have {first} to {last}")
    return tuple(ids)


def _window(d: Json) -> int | None:
    types = d.get("layer_types") or ["full_attention"]
    if types == ["full_attention"]:
        return None
    if types != ["sliding_attention"]:
        raise ValueError(f"layer_types is {types!r}, not the kind of one layer")
    window = integer(d, "sliding_window")
    if window < 1:
        raise ValueError(f"sliding_window is {window}, below 1")
    return window


def _check_fit(drafter: EagleConfig, d: Json, target: ModelConfig, file: Path) -> None:
    """Refuses a drafter that was trained for a target of other sizes."""
    pairs = [
        ("hidden_size", drafter.target_hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ]
    if "num_target_layers" in d:
        pairs.append(("num_target_layers", d["num_target_layers"], target.num_layers))
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise ModelFileError(
                file,
                f"was trained for a target whose {key} is {ours}, this target's is {theirs}",
                "name the target it was trained for, or another drafter",
            )
