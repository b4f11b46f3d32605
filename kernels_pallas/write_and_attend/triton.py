"""`write_and_attend` in Pallas-Triton: attention whose last split makes and writes the block's KV.

Queries are normed and rotated in registers, by every program for itself. The block's own K and V
are one more tile, behind those of the pages, which are read only up to the block: no program reads
what another one writes, and none waits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch, limits
from kernels_pallas.early_launch import program_id
from kernels_pallas.kv_write.triton import (
    load_halves,
    load_lanes,
    load_weights,
    normalize,
    rotate,
    store_halves,
    turns,
)
from kernels_pallas.paged_attention import triton as attention
from kernels_pallas.paged_attention.plan import make_plan
from kernels_pallas.paged_attention.triton import (
    Tiles,
    add_up,
    fold,
    nothing_found,
    put,
    see_by_mask,
    see_in_order,
    share_of,
)

_MOST_ADDED_UP = 8192  # f32 numbers that one program adds up, 64 registers a thread
_PROGRAMS = 132  # of a launch: one for each of an H200's multiprocessors, or as many as rows
MAX_BLOCK = 16  # rows of the block's own tile, the least that the tensor cores take


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tokens: int  # of the block, whose queries one program takes; a power of two
    tile_kv: int  # this and all others as of `paged_attention`
    shares: int
    num_warps: int
    num_stages: int
    # Query rows of one program of a merge; None: the last split of a row to end adds all up.
    tile_merge: int | None = 8


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None; it knows head_dim."""
    return attention.refuses(device, shapes)


def choose(
    batch: int, block: int, group: int, kv_heads: int, dim: int, max_rows: int, bits: int
) -> Config:
    """The launch for a batch bucket; arguments as of `paged_attention`'s `choose`."""
    rows_a_token, tile_kv = pl.next_power_of_2(group), 64 if bits <= 16 else 32
    tokens = min(pl.next_power_of_2(block), max(1, 64 // rows_a_token))
    tiles = batch * (-(-max_rows // tile_kv) + 1)
    shares = max(1, min(_PROGRAMS // (kv_heads * -(-block // tokens)), tiles, 32))
    tile_merge = 2 if batch * kv_heads * block * group <= 1024 else 8
    # The last program of a row to end adds up, where it can do it at once: of a lone row perhaps
    # with fewer tokens a program, which reads the KV once more for each, from L2.
    for fewer in (tokens, 2, 1) if batch == 1 else (tokens,):
        programs = kv_heads * -(-block // fewer)
        room = _PROGRAMS // programs * (1 if fewer == tokens else 2)
        most = _MOST_ADDED_UP // (pl.next_power_of_2(fewer * group) * dim)
        if min(most, room) >= min(shares, 16):
            tokens, shares, tile_merge = fewer, min(most, room, tiles, 32), None
            break
    row_bytes = dim * bits // 8
    tile_q = tokens * heads_of(tokens, group)
    stages = limits.num_stages(3, 2 * tile_kv * row_bytes, (tile_q + 2 * MAX_BLOCK) * row_bytes)
    return Config(tokens, tile_kv, shares, num_warps=4, num_stages=stages, tile_merge=tile_merge)


def heads_of(tokens: int, group: int) -> int:
    """Query heads of one program with each token: with tokens a power of two, at least 16 rows."""
    return max(pl.next_power_of_2(group), 16 // tokens)


def write_and_attend(
    qkv: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    layer: jax.Array | None,
    eps: float,
    causal: bool,
    window: int | None,
    scale: float,
    block_mask: jax.Array | None,
    early_launch: bool = False,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `write_and_attend`. Grid: (J * tiles of the block's tokens, splits of all rows)."""
    batch, block, width = qkv.shape
    page_size, dim = kv_pages.shape[3:]
    group = num_heads // num_kv_heads
    max_rows = page_table.shape[1] * page_size
    if config is None:
        bits = jnp.finfo(qkv.dtype).bits
        config = choose(batch, block, group, num_kv_heads, dim, max_rows, bits)
    token_tiles = -(-block // config.tokens)
    is_split, adds_up = config.shares > 1, config.shares > 1 and config.tile_merge is None
    plan = make_plan(
        lens,
        block=block,
        window=window,
        tile=config.tile_kv,
        reach=max_rows,
        shares=config.shares,
        block_apart=True,
    )
    parts = (plan.programs.shape[0], num_kv_heads, block * group)
    partial = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*parts, dim), parts, parts)
    ] * is_split
    # How many splits of a row's queries have ended. XLA clears those of all layers in one launch,
    # unless zeros of the same type and shape are made elsewhere: then it copies them for each.
    counts = [jnp.zeros((batch, num_kv_heads * token_tiles), jnp.uint32)] * adds_up
    out, kv_pages, *partial = pl.pallas_call(
        functools.partial(
            _kernel,
            num_heads=num_heads,
            eps=eps,
            causal=causal,
            window=window,
            scale=scale,
            config=config,
            early_launch=early_launch,
            interpret=interpret,
        ),
        name="write_and_attend",
        grid=(num_kv_heads * token_tiles, parts[0] if is_split else batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, block, num_heads, dim), qkv.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
            *partial,
            *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in counts),
        ),
        input_output_aliases={1: 1, 2: 5} if adds_up else {1: 1},
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
    )(
        qkv.reshape(batch, block, width // dim, dim),
        kv_pages,
        counts,
        kv_locs,
        positions,
        inv_freq,
        page_table,
        lens,
        tuple(() if weight is None else (weight,) for weight in (q_norm, k_norm)),
        () if layer is None else (layer,),
        () if block_mask is None else (block_mask,),
        (plan.programs,) if is_split else (),
    )
    if is_split and not adds_up:
        out = attention.merge(
            out,
            plan,
            tuple(partial),
            group=group,
            shares=config.shares,
            most_rows=config.tile_merge,
            early_launch=early_launch,
            interpret=interpret,
        )
    return out, kv_pages


def _kernel(
    qkv_ref,  # [B, N, H + 2 J, D]
    _kv_pages,  # read and written through the output
    _counts,  # likewise, u32[B, J * tiles of tokens]
    kv_locs_ref,  # i32[B, N]
    positions_ref,  # i32[B, N]
    inv_freq_ref,  # f32[D / 2]
    page_table_ref,  # i32[B, M]
    lens_ref,  # i32[B]
    norm_refs,  # ((q_norm,) or (), (k_norm,) or ()), [D] each, or [L, D]
    layer_refs,  # () or (i32[1],)
    block_mask_refs,  # (u32[B, N, words],) or ()
    plan_refs,  # (`Plan.programs`,), or () where each row is one program
    out_ref,  # [B, N, H, D] of rows that are not split
    kv_ref,  # [P, 2, J, G, D]
    *partial_refs,  # of the others: f32 acc[S, J, R, D], m[S, J, R], total[S, J, R], counts
    num_heads,
    eps,
    causal,
    window,
    scale,
    config,
    early_launch,
    interpret,
):
    partial_refs, counts_refs = partial_refs[:3], partial_refs[3:]
    _, block, _, dim = qkv_ref.shape
    num_kv_heads, page_size = kv_ref.shape[2:4]
    group = num_heads // num_kv_heads
    tokens, heads = config.tokens, heads_of(config.tokens, group)
    tile_q, tile_kv = tokens * heads, config.tile_kv
    token_tiles = -(-block // tokens)
    first = program_id(0, early_launch)
    j, token_tile = first // token_tiles, first % token_tiles
    program = pl.program_id(1)
    reach = page_table_ref.shape[1] * page_size

    # Loads keep their order, and each first use waits: so all of them come before any use that can.
    layer = [pltriton.load(ref.at[jnp.int32(0)]) for ref in layer_refs]
    inv_freq = load_lanes(inv_freq_ref)
    b, split, splits, length = share_of(program, plan_refs, lens_ref)
    is_last = (split == splits - 1) & (splits > 0)

    # Tiles of the pages up to the block, one more for the block, and this program's share of them.
    start = jnp.int32(0) if window is None else jnp.maximum(length - (window - 1), 0)
    end = jnp.minimum(length, reach)
    first_tile, end_tile = start // tile_kv, (end + (tile_kv - 1)) // tile_kv
    units, parts = end_tile - first_tile + 1, jnp.maximum(splits, 1)
    low = first_tile + split * units // parts
    high = jnp.minimum(first_tile + (split + 1) * units // parts, end_tile)
    high = jnp.where(splits > 0, high, low)
    kv = Tiles(kv_ref, page_table_ref, b, j, tile_kv)
    pages = kv.pages_of(low)

    token = token_tile * tokens + jnp.arange(tokens, dtype=jnp.int32)
    head = jnp.arange(heads, dtype=jnp.int32)
    halves = load_halves(
        lambda lane: qkv_ref.at[b, token[:, None, None], (j * group + head)[None, :, None], lane],
        dim,
        (token < block)[:, None] & (head < group)[None, :] & (splits > 0),
    )
    # The block's own tile is looked at behind those of the pages.
    own = jnp.arange(MAX_BLOCK, dtype=jnp.int32)
    is_own = (own < block) & is_last
    own_k = load_halves(lambda lane: qkv_ref.at[b, own[:, None], num_heads + j, lane], dim, is_own)
    lane = jnp.arange(dim, dtype=jnp.int32)[None, :]
    own_v_ref = qkv_ref.at[b, own[:, None], num_heads + num_kv_heads + j, lane]
    own_v = pltriton.load(own_v_ref, mask=is_own[:, None], other=0.0)
    # The interpreter's masked stores write back what is there: to where hardly anything is written.
    nowhere = page_size - 1
    own_loc = pltriton.load(kv_locs_ref.at[b, own], mask=is_own, other=nowhere)
    weights = [load_weights(refs[0], layer) if refs else None for refs in norm_refs]
    if block == 1:  # [1, D / 2] of angles serve all
        position = own_position = pltriton.load(positions_ref.at[b, jnp.int32(0)])
    else:
        position, own_position = (
            pltriton.load(positions_ref.at[b, t], mask=t < block, other=0) for t in (token, own)
        )

    def prepared(halves, weights, sin, cos):
        """Normed and rotated heads, [rows, D], in the pages' type, and their halves, f32."""
        if weights is not None:
            halves = normalize(halves, weights, eps)
        halves = rotate(halves, sin, cos)
        # Joined lane by lane, then put in their places: the dialect cannot concatenate.
        whole = jnp.stack([x.astype(kv_ref.dtype) for x in halves], axis=-1).swapaxes(-1, -2)
        return whole.reshape(-1, dim), halves

    sin, cos = turns(position, inv_freq)
    q, _ = prepared(halves, weights[0], sin[:, None], cos[:, None])

    # Query rows, one a token and head: where they are, whether they are any.
    row = jnp.arange(tile_q, dtype=jnp.int32)
    i, head = token_tile * tokens + row // heads, row % heads
    inside = (i < block) & (head < group)
    q_position = length + i

    def step(t, carry, *, masked):
        pages, *found = carry
        position = kv.positions(t)
        keep = (position >= start) & (position < end) if masked else None
        k, v = kv.load(0, t, pages, keep), kv.load(1, t, pages, keep)
        # A step ahead, so that no load of KV waits for the page's number first.
        pages = kv.pages_of(t + 1)
        visible = None
        if masked:
            visible = jnp.broadcast_to(keep[None, :], (tile_q, tile_kv))
            if window is not None:
                visible &= see_in_order(position, q_position, end, causal, window)
        return pages, *fold(found, q, k, v, visible, scale)

    carry = (pages, *nothing_found(tile_q, dim))
    if window is None:
        whole = jnp.clip(end // tile_kv, low, jnp.maximum(low, high))
        carry = jax.lax.fori_loop(low, whole, functools.partial(step, masked=False), carry)
        low = whole
    _, *found = jax.lax.fori_loop(low, high, functools.partial(step, masked=True), carry)

    def with_own(*found):
        """Takes the block's own tile in, and writes it."""
        same = block == 1 or tokens == MAX_BLOCK
        turned = (sin, cos) if same else turns(own_position, inv_freq)
        k, k_halves = prepared(own_k, weights[1], *turned)
        page, offset = (own_loc // page_size)[:, None], (own_loc % page_size)[:, None]
        writes = is_own & (token_tile == 0)
        store_halves(lambda lane: kv_ref.at[page, 0, j, offset, lane], k_halves, writes)
        pltriton.store(kv_ref.at[page, 1, j, offset, lane], own_v, mask=writes[:, None])
        position = length + own
        within = ((own < block) & (position < reach))[None, :]
        if block_mask_refs:
            visible = see_by_mask(own, block_mask_refs[0], b, i, inside)
        else:
            visible = see_in_order(position, q_position, length + block, causal, window)
        # A token that an earlier query must not see may be NaN.
        sound = jnp.abs(own_v.astype(jnp.float32)) < jnp.inf
        v = jnp.where(sound, own_v, jnp.zeros_like(own_v))
        return fold(found, q, k, v, within & visible, scale)

    if plan_refs:
        found = jax.lax.cond(is_last, with_own, lambda *found: found, *found)
    else:
        found = with_own(*found)
    out_at = out_ref.at[b, i[:, None], (j * group + head)[:, None], lane]
    put(found, splits, out_at, partial_refs, (program, j, i * group + head), inside)

    if counts_refs:

        @pl.when(splits > 1)
        def _count():
            if not interpret:
                pltriton.debug_barrier()  # what all threads found is there before one says so
            ended = pltriton.atomic_add(counts_refs[0], (b, first), jnp.uint32(1))

            @pl.when(ended.astype(jnp.int32) == splits - 1)
            def _add_up():
                row = jnp.arange(pl.next_power_of_2(tokens * group), dtype=jnp.int32)
                own_row = row < tokens * group
                row = token_tile * tokens * group + row
                own_row &= row < block * group
                of_row = (b, j, row, own_row, program - split, splits)
                add_up(partial_refs, out_ref, *of_row, group, config.shares)
