"""The frozen target over packed rows: its features at every position, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import (
    LayerParams,
    TargetParams,
    embed_tokens,
    linear,
    rms_norm,
    rope_inv_freq,
    swiglu,
)
from jaxspec.training.anchors import TokenRows
from kernels_pallas.kv_write.reference import norm, rotate


class DenseOutput(NamedTuple):
    """What the target makes of packed rows."""

    features: jax.Array  # [R, S, F * E] residual stream after each feature layer, concatenated
    hidden: jax.Array | None  # [R, S, E] after the final norm, where asked for


DenseForward = Callable[[TargetParams, TokenRows], DenseOutput]


def build_dense_forward(
    config: ModelConfig,
    *,
    feature_layers: tuple[int, ...],
    with_hidden: bool = False,
    attention: str = "xla",
) -> DenseForward:
    """Builds (params, rows) -> DenseOutput; nothing is computed past the last layer needed.

    Tokens see the earlier ones of their own segment. The same function as `Target.forward` on a
    prompt, in a form that is fast for whole sequences.

    Args:
        config: sizes of the model.
        feature_layers: 0-based layers, ascending, whose outputs are wanted.
        with_hidden: whether the last layer's normed output is wanted too.
        attention: "xla" or "cudnn", as `jax.nn.dot_product_attention` has them.
    """
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    ends = [layer + 1 for layer in feature_layers]
    stretches = list(zip([0, *ends], [*ends, config.num_layers], strict=True))

    def forward(params: TargetParams, rows: TokenRows) -> DenseOutput:
        visible = causal_mask(rows.segments)
        layers = _stack_layers(params)

        def layer(x: jax.Array, own: _StackedLayer) -> tuple[jax.Array, None]:
            q, k, v = _qkv(x, own, rows.positions, jnp.asarray(inv_freq), config)
            attended = jax.nn.dot_product_attention(
                q, k, v, mask=visible, implementation=attention
            ).reshape(*x.shape[:-1], -1)
            x = x + linear(attended, own.params.o, own.params.o_bias)
            normed = rms_norm(x, own.post_norm, config.rms_norm_eps)
            return x + swiglu(normed, own.params), None

        x = embed_tokens(params.embed, rows.token_ids)
        features = []
        for start, stop in stretches[:-1]:
            x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda w: w[start:stop], layers))  # noqa: B023
            features.append(x)
        hidden = None
        if with_hidden:
            start, stop = stretches[-1]
            if start < stop:
                x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda w: w[start:stop], layers))
            hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
        return DenseOutput(jnp.concatenate(features, axis=-1), hidden)

    return forward


def causal_mask(segments: jax.Array) -> jax.Array:
    """bool[R, 1, S, S]: whether a token sees another, earlier and of its own segment."""
    size = segments.shape[1]
    earlier = jnp.tril(jnp.ones((size, size), bool))[None]
    return (earlier & (segments[:, :, None] == segments[:, None, :]))[:, None]


class _StackedLayer(NamedTuple):
    """One layer's weights, or all layers' with a leading axis."""

    params: LayerParams
    input_norm: jax.Array
    post_norm: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None


def _stack_layers(params: TargetParams) -> _StackedLayer:
    # One body for all layers compiles tens of seconds faster than a layer after another.
    return _StackedLayer(
        jax.tree.map(lambda *weights: jnp.stack(weights), *params.layers),
        params.input_norms,
        params.post_norms,
        params.q_norms,
        params.k_norms,
    )


def _qkv(
    x: jax.Array,
    layer: _StackedLayer,
    positions: jax.Array,
    inv_freq: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    heads = linear(normed, layer.params.qkv, layer.params.qkv_bias)
    heads = heads.reshape(*x.shape[:-1], -1, config.head_dim)
    first = config.num_heads
    q, k, v = jnp.split(heads, [first, first + config.num_kv_heads], axis=-2)
    q = rotate(norm(q, layer.q_norm, config.rms_norm_eps), positions, inv_freq).astype(x.dtype)
    k = rotate(norm(k, layer.k_norm, config.rms_norm_eps), positions, inv_freq).astype(x.dtype)
    return q, k, v
