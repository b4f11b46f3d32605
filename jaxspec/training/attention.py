"""Attention of drafted blocks to their context and to themselves, many blocks of a row at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.layers import LayerSpec
from jaxspec.training.anchors import Anchors, TokenRows

_HIDDEN = -1e30  # finite, so that a block without any context has no NaN on its way


class Context(NamedTuple):
    """Keys and values of a row's tokens, one layer's."""

    k: jax.Array  # [R, S, J, D] normed and rotated
    v: jax.Array  # [R, S, J, D]


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    rows: TokenRows,
    anchors: Anchors,
    *,
    spec: LayerSpec,
    chunk: int,
) -> jax.Array:
    """Attends from each block to the tokens before its anchor and to its own N tokens.

    A block sees token j of its row iff j stands before the anchor (by position, strictly: the
    anchor itself has no target features yet when it is served) and belongs to the anchor's
    segment; other blocks never. Both parts share one softmax.

    Args:
        q: [R, A, N, H, D], normed and rotated, as k.
        k: [R, A, N, J, D] of the blocks.
        v: [R, A, N, J, D].
        context: of the row.
        rows: segments and positions.
        anchors: where the blocks begin.
        spec: causality inside the block and window of the layer.
        chunk: blocks of a row whose scores are in memory at once; divides A.

    Returns:
        [R, A, N, H, D].
    """
    num_blocks = q.shape[1]

    @jax.checkpoint  # scores are large and cheap to make again
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
        return _attend(q, k, v, context, _visible(rows, index, q.shape[2], spec), spec)

    if chunk >= num_blocks:
        return attend(q, k, v, anchors.index)
    parts = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0),
        (q, k, v, anchors.index),
    )
    out = jax.lax.map(lambda part: attend(*part), parts)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _visible(rows: TokenRows, index: jax.Array, size: int, spec: LayerSpec) -> jax.Array:
    """bool[R, A, N or 1, S]: which tokens of the row each query of a block sees."""
    columns = jnp.arange(rows.segments.shape[1], dtype=jnp.int32)[None, None]
    own = jnp.take_along_axis(rows.segments, index, axis=1)[:, :, None]
    visible = (columns < index[:, :, None]) & (rows.segments[:, None] == own)
    visible = visible[:, :, None]
    if spec.window is None:
        return visible
    offsets = jnp.arange(size, dtype=jnp.int32)[None, None, :, None]
    distance = index[:, :, None, None] + offsets - columns[:, :, None]
    return visible & (distance < spec.window)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    visible: jax.Array,
    spec: LayerSpec,
) -> jax.Array:
    rows, blocks, size, heads, width = q.shape
    kv_heads = k.shape[-2]
    # f32 scores [R, J, A, N, group, keys]: the order in which the product comes out, since
    # turning them around would cost as much as making them. Query head h reads KV head h // group.
    q = q.reshape(rows, blocks, size, kv_heads, heads // kv_heads, width)
    q = q * jnp.asarray(width**-0.5, q.dtype)
    dots = {"preferred_element_type": jnp.float32}
    far = jnp.einsum("ranjgd,rsjd->rjangs", q, context.k, **dots)
    near = jnp.einsum("ranjgd,ramjd->rjangm", q, k, **dots)
    far = jnp.where(visible[:, None, :, :, None], far, _HIDDEN)
    near = jnp.where(_visible_in_block(size, spec)[None, None, None, :, None], near, _HIDDEN)
    top = jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1) + near.sum(-1)
    out = jnp.einsum("rjangs,rsjd->rjangd", far.astype(v.dtype), context.v, **dots)
    out += jnp.einsum("rjangm,ramjd->rjangd", near.astype(v.dtype), v, **dots)
    out = (out / total[..., None]).astype(v.dtype)
    return jnp.transpose(out, (0, 2, 3, 1, 4, 5)).reshape(rows, blocks, size, heads, width)


def _visible_in_block(size: int, spec: LayerSpec) -> jax.Array:
    """bool[N, N]: query by key."""
    steps = jnp.arange(size, dtype=jnp.int32)
    distance = steps[:, None] - steps[None]
    visible = distance >= 0 if spec.causal else jnp.ones((size, size), bool)
    if spec.window is not None:
        visible &= jnp.abs(distance) < spec.window
    return visible
