"""`paged_attention` in Pallas-Triton: flash decoding over pages, then one merge of the splits."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch

_MASKED = -1e30  # finite: a row with nothing visible yet stays free of inf - inf
_LOG2_E = math.log2(math.e)


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_q: int  # query rows (token, head) of one program, a power of two, at least 16
    tile_kv: int  # KV rows of one step, a power of two, at least 16
    splits: int  # programs that share the KV of one row, a power of two
    num_warps: int
    num_stages: int
    tile_merge: int = 8  # query rows of one program of the merge


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows head_dim, a power of two from 16 to 256 (Triton values have such sizes).
    """
    dim = shapes.get("head_dim", 128)
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head_dim={dim} is not a power of two from 16 to 256"
    return dispatch.refuses_triton(device)


def choose(batch: int, block: int, group: int, kv_heads: int, max_rows: int, bits: int) -> Config:
    """The launch for a batch bucket.

    Args:
      batch, block, group, kv_heads: B, N, H // J, J.
      max_rows: M * G, rows of KV that a page table reaches.
      bits: of an element; float32 tiles are half as long, to fit shared memory.
    """
    rows = block * group
    tile_q = min(max(pl.next_power_of_2(rows), 16), 64)
    tile_kv = 64 if bits <= 16 else 32
    programs = batch * kv_heads * -(-rows // tile_q)
    # Enough programs for two on each of 132 multiprocessors, but each with two tiles or more.
    wanted = pl.next_power_of_2(-(-2 * 132 // programs))
    most = pl.next_power_of_2(max(1, max_rows // (2 * tile_kv)))
    return Config(tile_q, tile_kv, min(wanted, most, 32), num_warps=4, num_stages=3)


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
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `paged_attention`.

    Grid: (tiles of query rows * splits, J, B). A query row is a token and one of the G heads that
    share a KV head, so that each KV row is read once for all of them.
    """
    batch, block, heads, dim = q.shape
    kv_heads, page_size = kv_pages.shape[2:4]
    group = heads // kv_heads
    max_rows = page_table.shape[1] * page_size
    if config is None:
        bits = jnp.finfo(q.dtype).bits
        config = choose(batch, block, group, kv_heads, max_rows, bits)
    rows = block * group
    q_tiles = -(-rows // config.tile_q)
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if config.splits > 1:
        parts = (batch, kv_heads, config.splits, rows)
        out_shape = (
            jax.ShapeDtypeStruct((*parts, dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        )
    out = pl.pallas_call(
        functools.partial(
            _attend, causal=causal, window=window, scale=scale, config=config, group=group
        ),
        name="paged_attention",
        grid=(q_tiles * config.splits, kv_heads, batch),
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
    )(q, kv_pages, page_table, lens, () if block_mask is None else (block_mask,))
    if config.splits == 1:
        return out
    tile = min(pl.next_power_of_2(rows), config.tile_merge)
    return pl.pallas_call(
        functools.partial(_merge, tile=tile, group=group),
        name="paged_attention_merge",
        grid=(-(-rows // tile), kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=max(1, tile * dim // 256), num_stages=1),
        interpret=interpret,
    )(*out)


def _attend(
    q_ref,  # [B, N, H, D]
    kv_ref,  # [P, 2, J, G, D]
    page_table_ref,  # [B, M]
    lens_ref,  # [B]
    block_mask_refs,  # (u32[B, N, words],) or ()
    *out_refs,  # [B, N, H, D]; or f32 acc[B, J, S, R, D], m[B, J, S, R], total[B, J, S, R]
    causal,
    window,
    scale,
    config,
    group,
):
    _, block, _, dim = q_ref.shape
    page_size, columns = kv_ref.shape[3], page_table_ref.shape[1]
    tile = config.tile_kv
    rows = block * group
    q_tiles = -(-rows // config.tile_q)
    q_tile, split = pl.program_id(0) % q_tiles, pl.program_id(0) // q_tiles
    j, b = pl.program_id(1), pl.program_id(2)

    length = pltriton.load(lens_ref.at[b])
    row = q_tile * config.tile_q + jnp.arange(config.tile_q, dtype=jnp.int32)
    inside = row < rows
    i, head = row // group, j * group + row % group
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]
    q = pltriton.load(q_ref.at[b, i[:, None], head[:, None], lane], mask=inside[:, None], other=0.0)
    q_position = length + i

    # KV rows that some query of the program may see: [start, end).
    last = block
    if causal and not block_mask_refs:
        last = jnp.minimum((q_tile + 1) * config.tile_q // group + 1, block)
    end = jnp.minimum(length + last, columns * page_size)
    start = jnp.int32(0)
    if window is not None:
        start = jnp.maximum(length + q_tile * config.tile_q // group - (window - 1), 0)
    first_tile, end_tile = start // tile, (end + (tile - 1)) // tile
    each = (end_tile - first_tile + (config.splits - 1)) // config.splits
    low = first_tile + split * each
    high = jnp.minimum(low + each, end_tile)

    def pages_of(t):
        """The page of tile t, or of each of its rows where a tile spans several."""
        if page_size % tile == 0:
            column = jnp.minimum(t * tile // page_size, columns - 1)
            return pltriton.load(page_table_ref.at[b, column])
        column = (t * tile + jnp.arange(tile, dtype=jnp.int32)) // page_size
        return pltriton.load(page_table_ref.at[b, column], mask=column < columns, other=0)

    def load(kv_index, t, pages, position, keep):
        if page_size % tile == 0:
            offset = pl.ds(t * tile % page_size, tile)
            ref = kv_ref.at[pages, jnp.int32(kv_index), j, offset]
        else:
            ref = kv_ref.at[pages[:, None], kv_index, j, (position % page_size)[:, None], lane]
        if keep is None:
            return pltriton.load(ref)
        return pltriton.load(ref, mask=keep[:, None], other=0.0)

    def step(t, carry, *, masked):
        pages, m, total, acc = carry
        position = t * tile + jnp.arange(tile, dtype=jnp.int32)
        keep = (position >= start) & (position < end) if masked else None
        k = load(0, t, pages, position, keep)
        v = load(1, t, pages, position, keep)
        # A step ahead, so that no load of KV waits for the page's number first.
        pages = pages_of(t + 1)
        scores = _dot(q, k.T) * (scale * _LOG2_E)
        if masked:
            visible = see(position)
            scores = jnp.where(visible, scores, _MASKED)
            # A row of the block that an earlier query must not see may hold NaN.
            sound = (jnp.abs(v.astype(jnp.float32)) < jnp.inf) | (position < length)[:, None]
            v = jnp.where(sound, v, jnp.zeros_like(v))
        m_next = jnp.maximum(m, jnp.max(scores, axis=1))
        p = jnp.exp2(scores - m_next[:, None])
        if masked:
            p = jnp.where(visible, p, 0.0)
        alpha = jnp.exp2(m - m_next)
        total = total * alpha + jnp.sum(p, axis=1)
        return pages, m_next, total, acc * alpha[:, None] + _dot(p.astype(v.dtype), v)

    def see(position):
        """bool[tile_q, tile_kv]: as `_visible` of the reference."""
        position = position[None, :]
        within = position < end
        if block_mask_refs:
            j_in_block = position - length
            word = jnp.zeros((config.tile_q, 1), jnp.uint32)
            for w in range(block_mask_refs[0].shape[2]):
                words = pltriton.load(block_mask_refs[0].at[b, i, w], mask=inside, other=0)
                word = jnp.where(j_in_block // 32 == w, words[:, None], word)
            bit = (word >> (j_in_block % 32).astype(jnp.uint32)) & jnp.uint32(1)
            return within & ((j_in_block < 0) | (bit == 1))
        visible = position <= q_position[:, None] if causal else position < length + block
        visible &= within
        if window is not None:
            visible &= q_position[:, None] - position < window
            if not causal:
                visible &= position - q_position[:, None] < window
        return visible

    carry = (
        pages_of(low),
        jnp.full((config.tile_q,), _MASKED, jnp.float32),
        jnp.zeros((config.tile_q,), jnp.float32),
        jnp.zeros((config.tile_q, dim), jnp.float32),
    )
    if window is None:
        # Tiles before the block are seen whole, and need neither masks nor care for NaN.
        whole = jnp.clip(length // tile, low, jnp.maximum(low, high))
        carry = jax.lax.fori_loop(low, whole, functools.partial(step, masked=False), carry)
        low = whole
    _, m, total, acc = jax.lax.fori_loop(low, high, functools.partial(step, masked=True), carry)

    if config.splits == 1:
        out = acc / jnp.where(total == 0.0, 1.0, total)[:, None]
        out_ref = out_refs[0].at[b, i[:, None], head[:, None], lane]
        pltriton.store(out_ref, out.astype(q.dtype), mask=inside[:, None])
        return
    acc_ref, m_ref, total_ref = out_refs
    pltriton.store(acc_ref.at[b, j, split, row[:, None], lane], acc, mask=inside[:, None])
    pltriton.store(m_ref.at[b, j, split, row], m, mask=inside)
    pltriton.store(total_ref.at[b, j, split, row], total, mask=inside)


def _merge(
    acc_ref,  # f32[B, J, S, R, D]
    m_ref,  # f32[B, J, S, R] in units of log2
    total_ref,  # f32[B, J, S, R]
    out_ref,  # [B, N, H, D]
    *,
    tile,
    group,
):
    """Adds up what the splits of one KV head's query rows found. Grid: (tiles of rows, J, B)."""
    splits, rows = m_ref.shape[2:]
    j, b = pl.program_id(1), pl.program_id(2)
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    inside = row < rows
    dim = acc_ref.shape[-1]
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]

    def load(ref, s):
        at = (b, j, jnp.int32(s))
        if ref is acc_ref:
            return pltriton.load(ref.at[(*at, row[:, None], lane)], mask=inside[:, None], other=0.0)
        return pltriton.load(ref.at[(*at, row)], mask=inside, other=_MASKED)

    each_m, each_total, each_acc = (
        [load(ref, s) for s in range(splits)] for ref in (m_ref, total_ref, acc_ref)
    )
    m = functools.reduce(jnp.maximum, each_m)
    weights = [jnp.exp2(each - m) for each in each_m]
    total = sum(weight * each for weight, each in zip(weights, each_total, strict=True))
    acc = sum(weight[:, None] * each for weight, each in zip(weights, each_acc, strict=True))
    out = acc / jnp.where(total == 0.0, 1.0, total)[:, None]
    i, head = row // group, j * group + row % group
    pltriton.store(
        out_ref.at[b, i[:, None], head[:, None], lane],
        out.astype(out_ref.dtype),
        mask=inside[:, None],
    )


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b accumulated in f32; float32 operands are not cut to tf32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
