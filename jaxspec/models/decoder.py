"""The dense decoder that Llama and Qwen3 share, as a `Target`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.base import KV, Block, Kernels, Target, TargetOutput
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import (
    LayerSpec,
    TargetParams,
    decoder_layers,
    embed_tokens,
    logits_of,
    rope_inv_freq,
)


def build_decoder(
    config: ModelConfig,
    *,
    feature_layers: tuple[int, ...],
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
) -> Target:
    """Builds the pure functions of a model.

    Args:
        config: sizes and constants.
        feature_layers: 0-based layers whose output (residual stream after both adds) a drafter
            reads, in this order; the last layer's is taken before the final norm, and the number
            of layers stands for what comes after that norm.
        page_size: G, tokens a KV page holds.
        dtype: of parameters, activations and KV; sums and logits are float32.
        kernels: the implementation of each op.

    Raises:
        ValueError: a feature layer that the model does not have.
    """
    for layer in feature_layers:
        if not 0 <= layer <= config.num_layers:
            raise ValueError(
                f"feature layer {layer} does not exist: the model has layers 0 to "
                f"{config.num_layers - 1}, and {config.num_layers} is its final norm; "
                "use a drafter made for this model"
            )
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    spec = LayerSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
    )

    def embed(params: TargetParams, token_ids: jax.Array) -> jax.Array:
        return embed_tokens(params.embed, token_ids)

    def forward(params: TargetParams, kv: KV, block: Block) -> TargetOutput:
        x = embed(params, block.token_ids)
        out = decoder_layers(
            x,
            kv,
            block,
            params,
            params.final_norm,
            inv_freq=jnp.asarray(inv_freq),
            specs=(spec,) * config.num_layers,
            kernels=kernels,
            outputs=feature_layers,
        )
        return TargetOutput(
            hidden=out.hidden,
            features=_features([*out.outputs, out.hidden], feature_layers),
            kv=out.kv,
        )

    def logits(params: TargetParams, hidden: jax.Array) -> jax.Array:
        with jax.named_scope("logits"):
            return logits_of(hidden, params.head)

    def init_kv(num_pages: int) -> KV:
        shape = (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return Target(embed=embed, forward=forward, logits=logits, init_kv=init_kv)


def _features(outputs: list[jax.Array], feature_layers: tuple[int, ...]) -> jax.Array:
    if not feature_layers:
        return jnp.zeros((*outputs[0].shape[:-1], 0), outputs[0].dtype)
    return jnp.concatenate([outputs[layer] for layer in feature_layers], axis=-1)
