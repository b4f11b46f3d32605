"""The merge of `paged_attention`'s splits in Pallas Mosaic GPU.

It lets the product behind it be launched before it waits for attention, as no kernel of
Pallas-Triton can: that product then asks for its weight while attention still runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import dispatch, early_launch

MOST_QUERIES = 16  # of a batch; more are merged faster by Triton's kernel, in tiles
_THREADS = 128  # of a program; each has some of a head's columns
_AT_ONCE = 8  # parts whose loads are under way at once


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why the merge cannot run on `device` with these shapes, or None; it knows head_dim."""
    dim = shapes.get("head_dim", _THREADS)
    if dim % _THREADS:
        return f"head_dim={dim} is not a multiple of {_THREADS}"
    return early_launch.refuses_ahead(device)


def serves(batch: int, block: int, dim: int) -> bool:
    """Whether it is this merge that is made under Mosaic's name."""
    return batch * block <= MOST_QUERIES and dim % _THREADS == 0


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
    """As `triton.merge`. Grid: (query rows, J, split rows)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = functools.partial(
        _merge, shares=shares, by_head=by_head, early_launch=early_launch, interpret=interpret
    )
    run.__name__ = "paged_attention_merge"
    _, block, heads, _ = out.shape
    kv_heads = acc.shape[1]
    rows = block * heads // kv_heads
    ref = jax.new_ref(out)
    plgpu.kernel(
        run,
        grid=(rows, kv_heads, split_rows.shape[0]),
        grid_names=("row", "head", "place"),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(ref, split_rows, acc, m, total)
    return jax.freeze(ref)


def _merge(
    out_gmem,  # [B, N, H, D]
    split_rows_gmem,  # `Plan.split_rows`
    acc_gmem,  # f32[S, J, R, D]
    m_gmem,  # f32[S, J, R] in units of log2
    total_gmem,  # f32[S, J, R]
    *,
    shares,
    by_head,
    early_launch,
    interpret,
):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if early_launch:
        plgpu.griddepcontrol_launch_dependents()
    row, j, place = (lax.axis_index(name) for name in ("row", "head", "place"))
    block, group = out_gmem.shape[1], out_gmem.shape[2] // acc_gmem.shape[1]
    inner = np.int32(block if by_head else group)
    if not interpret:
        plgpu.griddepcontrol_wait()
    b, first, splits = (split_rows_gmem[place, column] for column in range(3))

    @pl.when(splits > 1)
    def _add_up():
        def add(chunk, *sums):
            low = chunk * np.int32(_AT_ONCE)
            inside = [splits > low + np.int32(s) for s in range(min(shares, _AT_ONCE))]
            at = [
                first + jnp.where(one, low + np.int32(s), np.int32(0))
                for s, one in enumerate(inside)
            ]
            parts = [
                (
                    jnp.where(one, m_gmem[s, j, row], -jnp.inf),
                    total_gmem[s, j, row],
                    acc_gmem[s, j, row],
                )
                for s, one in zip(at, inside, strict=True)
            ]
            ms, totals, accs = zip(*sums, *parts, strict=True)
            most = functools.reduce(jnp.maximum, ms)
            weights = [jnp.exp2(m - most) for m in ms]
            total = sum(w * one for w, one in zip(weights, totals, strict=True))
            acc = sum(w * one for w, one in zip(weights, accs, strict=True))
            return most, total, acc

        sums = add(np.int32(0))
        if shares > _AT_ONCE:
            chunks = lax.div(splits + np.int32(_AT_ONCE - 1), np.int32(_AT_ONCE))
            sums = lax.fori_loop(np.int32(1), chunks, lambda i, sums: add(i, sums), sums)
        _, total, acc = sums
        acc = acc / jnp.where(total == 0.0, 1.0, total)
        token, head = lax.div(row, inner), lax.rem(row, inner)
        if by_head:
            token, head = head, token
        out_gmem[b, token, j * np.int32(group) + head] = acc.astype(out_gmem.dtype)
