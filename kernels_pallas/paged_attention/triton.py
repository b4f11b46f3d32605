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

from kernels_pallas import dispatch, limits
from kernels_pallas.early_launch import program_id
from kernels_pallas.paged_attention import mosaic_merge
from kernels_pallas.paged_attention.plans import make_plan

MASKED = -1e30  # finite: a row with nothing visible yet stays free of inf - inf
LOG2_E = math.log2(math.e)


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_q: int  # query rows (token, head) of one program, a power of two, at least 16
    tile_kv: int  # KV rows of one step, a power of two, at least 16
    shares: int  # into which a KV head's rows of a batch are cut, about; 1: no row is split
    num_warps: int
    num_stages: int


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows head_dim, a power of two from 16 to 256 (Triton values have such sizes).
    """
    dim = shapes.get("head_dim", 128)
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head_dim={dim} is not a power of two from 16 to 256"
    return dispatch.refuses_triton(device)


def choose(
    batch: int, block: int, group: int, kv_heads: int, dim: int, max_rows: int, bits: int
) -> Config:
    """The launch for a batch bucket.

    Args:
      batch, block, group, kv_heads, dim: B, N, H // J, J, D.
      max_rows: M * G, rows of KV that a page table reaches.
      bits: of an element; float32 tiles are half as long, to fit shared memory.
    """
    rows = block * group
    tile_q = min(max(pl.next_power_of_2(rows), 16), 64)
    tile_kv = 64 if bits <= 16 else 32
    # One program for each of an H200's multiprocessors, or as many as there are rows.
    programs = kv_heads * -(-rows // tile_q)
    shares = max(1, min(limits.MULTIPROCESSORS // programs, batch * -(-max_rows // tile_kv), 32))
    row_bytes = dim * bits // 8
    stages = limits.num_stages(3, 2 * tile_kv * row_bytes, tile_q * row_bytes)
    return Config(tile_q, tile_kv, shares, num_warps=4, num_stages=stages)


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
    early_launch: bool = False,
    interpret: bool,
    config: Config | None = None,
    merge_ahead: bool = False,
) -> jax.Array:
    """See `paged_attention`; merge_ahead: by the kernel of `mosaic_merge.py`.

    Grid: (J * tiles of query rows, splits of all rows). A query row is a token and one of the heads
    that share a KV head, so that each KV row is read once for all of them.
    """
    batch, block, heads, dim = q.shape
    kv_heads, page_size = kv_pages.shape[2:4]
    group = heads // kv_heads
    max_rows = page_table.shape[1] * page_size
    if config is None:
        bits = jnp.finfo(q.dtype).bits
        config = choose(batch, block, group, kv_heads, dim, max_rows, bits)
    rows = block * group
    attend = functools.partial(
        _attend,
        causal=causal,
        window=window,
        scale=scale,
        config=config,
        group=group,
        early_launch=early_launch,
    )
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    q_tiles = kv_heads * -(-rows // config.tile_q)
    params = pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    masks = () if block_mask is None else (block_mask,)
    if config.shares == 1:
        return pl.pallas_call(
            attend,
            name="paged_attention",
            grid=(q_tiles, batch),
            out_shape=out_shape,
            compiler_params=params,
            interpret=interpret,
        )(q, kv_pages, page_table, lens, masks, ())

    plan = make_plan(
        lens,
        block=block,
        window=window,
        tile=config.tile_kv,
        reach=max_rows,
        shares=config.shares,
    )
    num_programs = plan.programs.shape[0]
    parts = (num_programs, kv_heads, rows)
    out, *partial = pl.pallas_call(
        attend,
        name="paged_attention",
        grid=(q_tiles, num_programs),
        out_shape=(
            out_shape,
            jax.ShapeDtypeStruct((*parts, dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        compiler_params=params,
        interpret=interpret,
    )(q, kv_pages, page_table, lens, masks, (plan.programs,))
    merge_by = mosaic_merge.merge if merge_ahead else merge
    return merge_by(
        out,
        plan.split_rows,
        *partial,
        shares=config.shares,
        early_launch=early_launch,
        interpret=interpret,
    )


def merge(
    out: jax.Array,
    split_rows: jax.Array,
    acc: jax.Array,
    m: jax.Array,
    total: jax.Array,
    *,
    shares: int,
    by_head: bool = False,
    early_launch: bool,
    interpret: bool,
) -> jax.Array:
    """Writes the rows of `out` that were split, in place.

    Grid: (tiles of query rows, J, split rows).

    Args:
      out: [B, N, H, D].
      split_rows: `Plan.split_rows`.
      acc, m, total: f32[S, J, R, D], [S, J, R], [S, J, R] of each part, with at least N * H // J
        query rows; m in units of log2.
      shares: the most parts of a row.
      by_head: whether query rows are those of head after head, not of token after token.
      early_launch: see `kernels_pallas.early_launch`.
    """
    batch, block, heads, dim = out.shape
    kv_heads = m.shape[1]
    rows = block * heads // kv_heads
    tile = min(pl.next_power_of_2(rows), 2 if batch * kv_heads * rows <= 1024 else 8)
    return pl.pallas_call(
        functools.partial(
            _merge, tile=tile, by_head=by_head, shares=shares, early_launch=early_launch
        ),
        name="paged_attention_merge",
        grid=(-(-rows // tile), kv_heads, split_rows.shape[0]),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=max(1, min(8, pl.next_power_of_2(shares) * tile * dim // 1024)),
            num_stages=1,
        ),
        interpret=interpret,
    )(out, split_rows, acc, m, total)


def _attend(
    q_ref,  # [B, N, H, D]
    kv_ref,  # [P, 2, J, G, D]
    page_table_ref,  # [B, M]
    lens_ref,  # [B]
    block_mask_refs,  # (u32[B, N, words],) or ()
    plan_refs,  # (`Plan.programs`,), or () where each row is one program
    out_ref,  # [B, N, H, D] of rows that are not split
    *partial_refs,  # of the others: f32 acc[S, J, R, D], m[S, J, R], total[S, J, R]
    causal,
    window,
    scale,
    config,
    group,
    early_launch,
):
    _, block, _, dim = q_ref.shape
    page_size, columns = kv_ref.shape[3], page_table_ref.shape[1]
    tile = config.tile_kv
    rows = block * group
    q_tiles = -(-rows // config.tile_q)
    first = program_id(0, early_launch)
    j, q_tile = first // q_tiles, first % q_tiles
    program = pl.program_id(1)
    if plan_refs:
        # Scalars out of memory, not computed here from all lengths: what a reduction yields the
        # compiler takes for different in each thread, and the loops lose 0.6 us a step.
        at = [plan_refs[0].at[program, jnp.int32(column)] for column in range(4)]
        b, split, splits, length = (pltriton.load(ref) for ref in at)
    else:
        b, split, splits = program, jnp.int32(0), jnp.int32(1)
        length = pltriton.load(lens_ref.at[b])
    row = q_tile * config.tile_q + jnp.arange(config.tile_q, dtype=jnp.int32)
    inside = row < rows
    i, head = row // group, j * group + row % group
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]
    q_at = (b, i[:, None], head[:, None], lane)
    q = pltriton.load(q_ref.at[q_at], mask=inside[:, None] & (splits > 0), other=0.0)
    q_position = length + i

    # KV rows that the block may see, and this program's share of their tiles.
    start = jnp.int32(0) if window is None else jnp.maximum(length - (window - 1), 0)
    end = jnp.minimum(length + block, columns * page_size)
    first_tile, end_tile = start // tile, (end + (tile - 1)) // tile
    each = (end_tile - first_tile + jnp.maximum(splits - 1, 0)) // jnp.maximum(splits, 1)
    low = first_tile + split * each
    high = jnp.where(splits > 0, jnp.minimum(low + each, end_tile), low)

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
        scores = _dot(q, k.T) * (scale * LOG2_E)
        if masked:
            visible = see(position)
            scores = jnp.where(visible, scores, MASKED)
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
        jnp.full((config.tile_q,), MASKED, jnp.float32),
        jnp.zeros((config.tile_q,), jnp.float32),
        jnp.zeros((config.tile_q, dim), jnp.float32),
    )
    if window is None:
        # Tiles before the block are seen whole, and need neither masks nor care for NaN.
        whole = jnp.clip(length // tile, low, jnp.maximum(low, high))
        carry = jax.lax.fori_loop(low, whole, functools.partial(step, masked=False), carry)
        low = whole
    _, m, total, acc = jax.lax.fori_loop(low, high, functools.partial(step, masked=True), carry)

    @pl.when(splits == 1)
    def _store_result():
        out = acc / jnp.where(total == 0.0, 1.0, total)[:, None]
        pltriton.store(out_ref.at[q_at], out.astype(q.dtype), mask=inside[:, None])

    if partial_refs:

        @pl.when(splits > 1)
        def _store_part():
            acc_ref, m_ref, total_ref = partial_refs
            pltriton.store(acc_ref.at[program, j, row[:, None], lane], acc, mask=inside[:, None])
            pltriton.store(m_ref.at[program, j, row], m, mask=inside)
            pltriton.store(total_ref.at[program, j, row], total, mask=inside)


def _merge(
    _,  # the result, written through the output
    split_rows_ref,  # `Plan.split_rows`
    acc_ref,  # f32[S, J, R, D]
    m_ref,  # f32[S, J, R] in units of log2
    total_ref,  # f32[S, J, R]
    out_ref,  # [B, N, H, D]
    *,
    tile,
    by_head,
    shares,
    early_launch,
):
    """Adds up what the splits of a row found. Grid: (tiles of query rows, J, split rows)."""
    kv_heads, _, dim = acc_ref.shape[1:]
    block, group = out_ref.shape[1], out_ref.shape[2] // kv_heads
    j, place = pl.program_id(1), pl.program_id(2)
    at = [split_rows_ref.at[place, jnp.int32(column)] for column in range(3)]
    b, first, splits = (pltriton.load(ref) for ref in at)
    row = program_id(0, early_launch) * tile + jnp.arange(tile, dtype=jnp.int32)
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]
    inside = row < block * group

    split = jnp.arange(pl.next_power_of_2(shares), dtype=jnp.int32)

    @pl.when(splits > 1)
    def _add_up():
        keep = inside[None, :] & (split < splits)[:, None]
        at = ((first + split)[:, None], j, row[None, :])
        m = pltriton.load(m_ref.at[at], mask=keep, other=MASKED)
        total = pltriton.load(total_ref.at[at], mask=keep, other=0.0)
        at = ((first + split)[:, None, None], j, row[None, :, None], lane[None])
        acc = pltriton.load(acc_ref.at[at], mask=keep[:, :, None], other=0.0)
        weight = jnp.exp2(m - jnp.max(m, axis=0, keepdims=True))
        total = jnp.sum(weight * total, axis=0)
        acc = jnp.sum(weight[:, :, None] * acc, axis=0)
        out = acc / jnp.where(total == 0.0, 1.0, total)[:, None]
        token, head = (row % block, row // block) if by_head else (row // group, row % group)
        at = (b, token[:, None], (j * group + head)[:, None], lane)
        pltriton.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside[:, None])


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b accumulated in f32; float32 operands are not cut to tf32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
