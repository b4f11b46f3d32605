"""`paged_attention` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# KV rows taken at a time. Measured on CPU: 64 to 128 is fastest, also for short tables.
_CHUNK_ROWS = 128
_MASKED = -1e30  # finite, so that a row with nothing visible yet stays free of inf - inf


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    block_mask: jax.Array | None,
) -> jax.Array:
    """See `paged_attention`; online softmax over chunks of pages, up to the longest row's end."""
    batch, block, heads, dim = q.shape
    kv_heads, page_size = kv_pages.shape[2:4]
    group = heads // kv_heads
    reach = page_table.shape[1] * page_size  # rows past the table do not exist
    columns = max(1, _CHUNK_ROWS // page_size)
    chunk = columns * page_size
    # A window makes every row start at its own first page, not at page 0 of its table.
    first_row = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - (window - 1), 0)
    first_page = first_row // page_size
    rows = q.reshape(batch, block, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, block * group, dim)

    def step(i, carry):
        m, total, acc = carry
        column = first_page[:, None] + i * columns + jnp.arange(columns, dtype=jnp.int32)[None, :]
        pages = jnp.take_along_axis(
            page_table, jnp.minimum(column, page_table.shape[1] - 1), axis=1
        )
        kv = kv_pages[pages].transpose(2, 0, 3, 1, 4, 5)
        k, v = kv.reshape(2, batch, kv_heads, chunk, dim)
        kv_positions = (first_page * page_size + i * chunk)[:, None] + jnp.arange(
            chunk, dtype=jnp.int32
        )[None, :]
        visible = _visible(kv_positions, lens, block, causal, window, block_mask)
        visible &= (kv_positions < reach)[:, None, :]
        visible = jnp.repeat(visible, group, axis=1)[:, None]
        v = _clean(v, kv_positions, first_row, lens, block)
        scores = jnp.einsum("bjrd,bjtd->bjrt", rows, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * scale, _MASKED)
        m_next = jnp.maximum(m, scores.max(axis=-1, keepdims=True))
        p = jnp.where(visible, jnp.exp(scores - m_next), 0.0)
        alpha = jnp.exp(m - m_next)
        total = total * alpha + p.sum(axis=-1, keepdims=True)
        pv = jnp.einsum("bjrt,bjtd->bjrd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return m_next, total, acc * alpha + pv

    column_shape = (batch, kv_heads, block * group, 1)
    carry = (
        jnp.full(column_shape, _MASKED, jnp.float32),
        jnp.zeros(column_shape, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    if page_table.shape[1] <= columns:
        _, total, acc = step(0, carry)
    else:
        used = jnp.max(jnp.minimum(lens + block, reach) - first_page * page_size)
        _, total, acc = jax.lax.fori_loop(0, (used + (chunk - 1)) // chunk, step, carry)
    out = (acc / jnp.where(total == 0, 1.0, total)).astype(q.dtype)
    out = out.reshape(batch, kv_heads, block, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape)


def _visible(
    kv_positions: jax.Array,
    lens: jax.Array,
    block: int,
    causal: bool,
    window: int | None,
    block_mask: jax.Array | None,
) -> jax.Array:
    """bool[B, N, T]: which of the T rows of KV each query sees."""
    kv_position = kv_positions[:, None, :]
    base = lens[:, None, None]
    if block_mask is not None:
        j = kv_position - base
        inside = jnp.clip(j, 0, block - 1)
        words = jnp.broadcast_to(inside // 32, (*block_mask.shape[:2], inside.shape[-1]))
        bits = jnp.take_along_axis(block_mask, words, axis=2) >> (inside % 32).astype(jnp.uint32)
        return (j < 0) | ((j < block) & ((bits & jnp.uint32(1)) == 1))
    q_position = base + jnp.arange(block, dtype=jnp.int32)[None, :, None]
    last = q_position if causal else jnp.broadcast_to(base + (block - 1), q_position.shape)
    visible = kv_position <= last
    if window is not None:
        visible &= q_position - kv_position < window
        if not causal:
            visible &= kv_position - q_position < window
    return visible


def _clean(
    v: jax.Array, kv_positions: jax.Array, first_row: jax.Array, lens: jax.Array, block: int
) -> jax.Array:
    """Zeroes what a weight of 0 would not silence: values past the row's end, NaN in its block."""
    before = (kv_positions >= first_row[:, None]) & (kv_positions < lens[:, None])
    inside = (kv_positions >= lens[:, None]) & (kv_positions < (lens + block)[:, None])
    keep = before[:, None, :, None] | (inside[:, None, :, None] & jnp.isfinite(v))
    return jnp.where(keep, v, jnp.zeros_like(v))
