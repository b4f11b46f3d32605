"""What a multi-layer EAGLE checkpoint says, parsed once into a hashable value. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

KIND = "multi_layer_eagle"


@dataclass(frozen=True, slots=True)
class MultiLayerEagleConfig:
    """Sizes and constants of N drafter layers, one for each token ahead.

    Embedding and output head are the target's, and so is the width.
    """

    num_layers: int  # N, drafts it can make
    is_chain: bool  # layer i + 1 reads layer i's output; else all read the target's feature
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    feature_layer: int  # the target's last layer: its output before the final norm
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False


def read_multi_layer_eagle_config(folder: Path, target: ModelConfig) -> MultiLayerEagleConfig:
    """Parses a checkpoint's config and holds it against the target's.

    No public checkpoint of this kind exists for a dense Llama or Qwen3 target; the keys are those
    of the models that ship such layers inside (DeepSeek-V3, MiMo-V2, Step-3.5), and
    `chain_hidden_states` says what SGLang decides by the model's name.

    Raises:
        ModelFileError: a missing or impossible value, or a drafter made for another target.
    """
    file = folder / "config.json"
    if (kind := detect_drafter(folder)) != KIND:
        raise ModelFileError(
            file, f"the drafter is {kind}, not {KIND}", "name a multi-layer EAGLE checkpoint"
        )
    config = read_json(file)
    refuse_quantization(config, file)
    try:
        drafter = _parse(config, target)
    except KeyError as error:
        raise ModelFileError(
            file,
            f"key {error} is missing",
            "it cannot be guessed without losing acceptance, add it as the drafter was trained",
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelFileError(file, str(error), "the config is not one jaxspec can run") from None
    check_sizes(drafter, file)
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter, key), getattr(target, key)
        if ours != theirs:
            raise ModelFileError(
                file,
                f"was trained for a target whose {key} is {ours}, this target's is {theirs}",
                "name the target it was trained for, or another drafter",
            )
    return drafter


def _parse(d: Json, target: ModelConfig) -> MultiLayerEagleConfig:
    for key, only in (("hidden_act", "silu"), ("mlp_bias", False)):
        if (value := d.get(key, only)) != only:
            raise ValueError(f"{key} is {value!r}, only {only!r} is supported")
    theta, scaling = parse_rope(d, default_theta=None)
    num_heads, hidden_size = integer(d, "num_attention_heads"), integer(d, "hidden_size")
    return MultiLayerEagleConfig(
        num_layers=integer(d, "num_nextn_predict_layers"),
        is_chain=boolean(d, "chain_hidden_states"),
        hidden_size=hidden_size,
        intermediate_size=integer(d, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=integer(d, "num_key_value_heads"),
        head_dim=integer(d, "head_dim", hidden_size // num_heads),
        rope_theta=theta,
        rms_norm_eps=number(d, "rms_norm_eps"),
        max_position_embeddings=integer(d, "max_position_embeddings"),
        vocab_size=integer(d, "vocab_size"),
        feature_layer=target.num_layers - 1,
        rope_scaling=scaling,
        attention_bias=boolean(d, "attention_bias", False),  # HF's default
        qk_norm=boolean(d, "qk_norm", False),  # as the target's family: Qwen3 has them
    )
