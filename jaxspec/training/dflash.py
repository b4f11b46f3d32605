"""The DFlash drafter as it is trained: many blocks of a row in one pass, without a cache.

The same function as `drafters.dflash`, which drafts one block a request over paged KV.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec.drafters.dflash import layer_specs, project_context
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.models.layers import (
    LayerParams,
    LayerSpec,
    linear,
    rms_norm,
    rope_inv_freq,
    swiglu,
)
from jaxspec.training.anchors import Anchors, TokenRows
from jaxspec.training.attention import Context, block_attention
from kernels_pallas.kv_write.reference import norm, rotate

_STD = 0.02  # of new matrices, as Hugging Face models have it


def init_params(config: DFlashConfig, key: jax.Array, *, final_norm: jax.Array) -> DFlashParams:
    """Draws a drafter's weights in float32.

    final_norm: [E], the target's: its head, which the drafter borrows, expects that scale.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv_rows = heads + 2 * config.num_kv_heads * config.head_dim
    inner, depth = config.intermediate_size, config.num_layers
    keys = iter(jax.random.split(key, 1 + 4 * depth))

    def matrix(rows: int, columns: int, std: float = _STD) -> jax.Array:
        return std * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    # What is added to the residual stream starts smaller the more layers add to it.
    out_std = _STD * (2 * depth) ** -0.5
    bias = functools.partial(jnp.zeros, dtype=jnp.float32) if config.attention_bias else None
    ones = functools.partial(jnp.ones, dtype=jnp.float32)
    return DFlashParams(
        fc=matrix(width, len(config.target_layer_ids) * config.target_hidden_size),
        hidden_norm=ones((width,)),
        norm=jnp.array(final_norm, jnp.float32),
        input_norms=ones((depth, width)),
        post_norms=ones((depth, width)),
        q_norms=ones((depth, config.head_dim)),
        k_norms=ones((depth, config.head_dim)),
        layers=tuple(
            LayerParams(
                qkv=matrix(qkv_rows, width),
                o=matrix(width, heads, out_std),
                gate_up=matrix(2 * inner, width),
                down=matrix(width, inner, out_std),
                qkv_bias=bias and bias((qkv_rows,)),
                o_bias=bias and bias((width,)),
            )
            for _ in range(depth)
        ),
    )


def block_ids(rows: TokenRows, anchors: Anchors, config: DFlashConfig) -> jax.Array:
    """i32[R, A, N]: the anchor's token, then masks."""
    bonus = jnp.take_along_axis(rows.token_ids, anchors.index, axis=1)[:, :, None]
    masks = jnp.full((*bonus.shape[:2], config.block_size - 1), config.mask_token_id, jnp.int32)
    return jnp.concatenate([bonus, masks], axis=2)


def block_hidden(
    params: DFlashParams,
    config: DFlashConfig,
    features: jax.Array,
    block_embeddings: jax.Array,
    rows: TokenRows,
    anchors: Anchors,
    *,
    chunk: int,
) -> jax.Array:
    """What the target's head reads for the mask slots of every block.

    Args:
        params: the drafter's weights, in the dtype to compute in.
        config: sizes.
        features: [R, S, F * E_target] of the row's tokens.
        block_embeddings: [R, A, N, E] of `block_ids`.
        rows: segments and positions.
        anchors: where the blocks begin.
        chunk: see `block_attention`.

    Returns:
        [R, A, K, E]; slot 0, the anchor itself, is left out.
    """
    inv_freq = jnp.asarray(rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling))
    # The context does not pass through the layers, so all of it is known before the first.
    context = project_context(params, features, config)
    starts = jnp.take_along_axis(rows.positions, anchors.index, axis=1)
    positions = starts[:, :, None] + jnp.arange(config.block_size, dtype=jnp.int32)[None, None]
    x = block_embeddings
    for index, spec in enumerate(layer_specs(config)):
        k = norm(context[:, :, index, 0], params.k_norms[index], config.rms_norm_eps)
        own = Context(
            k=rotate(k, rows.positions, inv_freq).astype(x.dtype),
            v=context[:, :, index, 1],
        )
        q, k, v = _block_qkv(x, params, index, positions, inv_freq, spec)
        attended = block_attention(q, k, v, own, rows, anchors, spec=spec, chunk=chunk)
        layer = params.layers[index]
        x = x + linear(attended.reshape(*x.shape[:-1], -1), layer.o, layer.o_bias)
        x = x + swiglu(rms_norm(x, params.post_norms[index], spec.rms_norm_eps), layer)
    return rms_norm(x[:, :, 1:], params.norm, config.rms_norm_eps)


def _block_qkv(
    x: jax.Array,
    params: DFlashParams,
    index: int,
    positions: jax.Array,
    inv_freq: jax.Array,
    spec: LayerSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [R, A, N, E] -> q [R, A, N, H, D], k and v [R, A, N, J, D]."""
    layer = params.layers[index]
    normed = rms_norm(x, params.input_norms[index], spec.rms_norm_eps)
    heads = linear(normed, layer.qkv, layer.qkv_bias).reshape(*x.shape[:3], -1, spec.head_dim)
    q, k, v = jnp.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=-2)
    q = rotate(norm(q, params.q_norms[index], spec.rms_norm_eps), positions, inv_freq)
    k = rotate(norm(k, params.k_norms[index], spec.rms_norm_eps), positions, inv_freq)
    return q.astype(x.dtype), k.astype(x.dtype), v
