"""Attention of a block of queries over KV in pages: decode, verify, draft, tree and prefill.

Read `reference.py`, `plans.py`, `triton.py`, `mosaic_merge.py`, `mosaic_block.py`; tests and
`bench.py` share the cases of `cases.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.paged_attention import mosaic_block, mosaic_merge, reference, triton
from kernels_pallas.paged_attention.plans import Plan

__all__ = ["Plan", "paged_attention", "plan_ahead"]


def _refuses_mosaic_gpu(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    return mosaic_merge.refuses(device, shapes) or triton.refuses(device, shapes)


# Under Mosaic's name its kernel takes blocks, and its merge few queries; the rest is Triton's.
BACKENDS = {"mosaic_gpu": _refuses_mosaic_gpu, "triton": triton.refuses}


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    block_mask: jax.Array | None = None,
    plan: Plan | None = None,
    early_launch: bool = False,
    implementation: str = "xla",
) -> jax.Array:
    """Returns softmax(scale * q k^T, over the rows each query sees) v, accumulated in f32.

    Row b's request owns the pages `page_table[b]`, in order; `lens[b]` rows of KV lie before the
    block and the block's own rows are already written behind them, at lens[b]..lens[b]+N-1. Query i
    stands at position lens[b] + i and sees KV position p when

    * causal: p <= lens[b] + i; not causal: p < lens[b] + N;
    * with a window W, also lens[b] + i - p < W, and p - lens[b] - i < W when not causal;
    * with a block mask, instead of both: p < lens[b], or bit p - lens[b] of query i's words is 1.

    Query head h reads KV head h // (H // J). Nobody sees rows past the table, p >= M * G. Rows that
    a query may not see may hold NaN: later in the block, past it, before the window, in page 0. A
    NaN in K reaches the queries that see it; a value of the block's own V that is not finite counts
    as 0.

    Args:
        q: [B, N, H, D] rotated queries. Padding rows hold anything.
        kv_pages: [P, 2, J, G, D] K and V of one layer, of q's dtype.
        page_table: i32[B, M] page ids; entries past the pages in use may be 0.
        lens: i32[B] rows of KV before the block, >= 0; padding rows have 0.
        causal: whether a query sees only itself and what is before it in the block.
        window: positions a query looks back over, itself included; None for all.
        scale: factor of the scores; None for D**-0.5.
        block_mask: u32[B, N, ceil(N / 32)] ancestors of each query in the block, itself included.
        plan: None, or what `plan_ahead` made; KV before the block is then asked for while the
            kernel that makes q still runs. `page_table`, `lens`, the plan and that KV must have
            been there before that kernel began, and it must launch this one early.
        early_launch: see `kernels_pallas.early_launch`.
        implementation: "xla", "triton", "mosaic_gpu", or what `dispatch.pick` chose.

    Returns:
        [B, N, H, D] in q's dtype; a query that sees nothing gets 0.

    Raises:
        ValueError: a window together with a block mask.
    """
    batch, block, heads, dim = q.shape
    chex.assert_rank(kv_pages, 5)
    kv_heads = kv_pages.shape[2]
    chex.assert_shape(kv_pages, (None, 2, kv_heads, None, dim))
    chex.assert_is_divisible(heads, kv_heads)
    chex.assert_shape(page_table, (batch, None))
    chex.assert_shape(lens, (batch,))
    chex.assert_type([page_table, lens], jnp.int32)
    chex.assert_type(kv_pages, q.dtype)
    if block_mask is not None:
        if window is not None:
            raise ValueError(
                f"{window=} cannot be combined with a block mask, whose bits already say what each "
                "query sees of its block; pass one of the two"
            )
        chex.assert_shape(block_mask, (batch, block, -(-block // 32)))
        chex.assert_type(block_mask, jnp.uint32)
    scale = dim**-0.5 if scale is None else scale
    match dispatch.parse("paged_attention", implementation):
        case "mosaic_gpu", interpret if _serves_block(q, kv_pages, window, block_mask):
            return mosaic_block.paged_attention(
                q,
                kv_pages,
                page_table,
                lens,
                causal=causal,
                scale=scale,
                plan=plan,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case ("mosaic_gpu" | "triton") as by, interpret:
            run = functools.partial(
                triton.paged_attention,
                early_launch=early_launch and not interpret,
                interpret=interpret,
                merge_ahead=by == "mosaic_gpu" and mosaic_merge.serves(batch, block, dim),
            )
        case _:
            run = reference.paged_attention
    return run(
        q,
        kv_pages,
        page_table,
        lens,
        causal=causal,
        window=window,
        scale=scale,
        block_mask=block_mask,
    )


def plan_ahead(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    window: int | None = None,
    block_mask: jax.Array | None = None,
    implementation: str = "xla",
) -> Plan | None:
    """What `paged_attention` of these needs besides q and KV, or None where it cannot ask ahead.

    q: only its shape and dtype are read. The others: as there.
    """
    by, _ = dispatch.parse("paged_attention", implementation)
    if by != "mosaic_gpu" or not _serves_block(q, kv_pages, window, block_mask):
        return None
    return mosaic_block.make_plan(q.shape, kv_pages.shape, page_table, lens)


def _serves_block(
    q: jax.Array | jax.ShapeDtypeStruct,
    kv_pages: jax.Array,
    window: int | None,
    block_mask: jax.Array | None,
) -> bool:
    """Whether Mosaic's kernel of blocks attends under its name."""
    plain_mask = window is None and block_mask is None
    return plain_mask and mosaic_block.serves(q.shape, kv_pages.shape, q.dtype)
