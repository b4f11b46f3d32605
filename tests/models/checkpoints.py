"""The fixtures of `make_fixtures.py` as parameters, by hand, independently of `jaxspec.weights`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.layers import LayerParams, TargetParams

DATA = Path(__file__).parents[1] / "data"

CONFIGS = {
    "llama": ModelConfig(
        architecture="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
        attention_bias=True,
    ),
    "qwen3": ModelConfig(
        architecture="qwen3",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        qk_norm=True,
    ),
}

DFLASH = DFlashConfig(
    num_layers=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=5000.0,
    rms_norm_eps=1e-6,
    block_size=6,
    mask_token_id=5,
    target_layer_ids=(1, 4),
    layer_windows=(7, None, 7),
    layer_causal=(True, False, True),
    max_position_embeddings=256,
    vocab_size=97,
    target_hidden_size=32,
    attention_bias=True,
)


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def target_params(file: dict[str, np.ndarray], config: ModelConfig) -> TargetParams:
    weights = {key.removeprefix("w.model."): value for key, value in file.items()}
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    return TargetParams(
        embed=jnp.asarray(weights["embed_tokens.weight"]),
        lm_head=None if config.tie_word_embeddings else jnp.asarray(file["w.lm_head.weight"]),
        final_norm=jnp.asarray(weights["norm.weight"]),
        **_norms(weights, layers, config.qk_norm),
        layers=tuple(_layer(weights, layer, config.attention_bias) for layer in layers),
    )


def dflash_params(file: dict[str, np.ndarray], num_layers: int = 3) -> DFlashParams:
    weights = {key.removeprefix("w."): value for key, value in file.items()}
    layers = [f"layers.{i}" for i in range(num_layers)]
    return DFlashParams(
        fc=jnp.asarray(weights["fc.weight"]),
        hidden_norm=jnp.asarray(weights["hidden_norm.weight"]),
        norm=jnp.asarray(weights["norm.weight"]),
        **_norms(weights, layers, qk_norm=True),
        layers=tuple(_layer(weights, layer, bias=True) for layer in layers),
    )


def _norms(weights: dict[str, np.ndarray], layers: list[str], qk_norm: bool) -> dict:
    def stacked(name: str):
        return jnp.asarray(np.stack([weights[f"{layer}.{name}.weight"] for layer in layers]))

    return {
        "input_norms": stacked("input_layernorm"),
        "post_norms": stacked("post_attention_layernorm"),
        "q_norms": stacked("self_attn.q_norm") if qk_norm else None,
        "k_norms": stacked("self_attn.k_norm") if qk_norm else None,
    }


def _layer(weights: dict[str, np.ndarray], layer: str, bias: bool) -> LayerParams:
    def joined(*names: str):
        return jnp.asarray(np.concatenate([weights[f"{layer}.{name}"] for name in names]))

    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    return LayerParams(
        qkv=joined(*(f"{name}.weight" for name in qkv)),
        o=joined("self_attn.o_proj.weight"),
        gate_up=joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=joined("mlp.down_proj.weight"),
        qkv_bias=joined(*(f"{name}.bias" for name in qkv)) if bias else None,
        o_bias=joined("self_attn.o_proj.bias") if bias else None,
    )
