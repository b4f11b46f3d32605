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
    early_launch: bool,
    interpret: bool,
) -> jax.Array:
    """Writes the rows of `out` that were split, in place. Grid: (query rows, J, split rows)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = functools.partial(_merge, shares=shares, early_launch=early_launch, interpret=interpret)
    run.__name__ = "paged_attention_merge"
    _, kv_heads, rows, _ = acc.shape
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
    early_launch,
    interpret,
):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if early_launch:
        plgpu.griddepcontrol_launch_dependents()
    row, j, place = (lax.axis_index(name) for name in ("row", "head", "place"))
    group = np.int32(out_gmem.shape[2] // acc_gmem.shape[1])
    if not interpret:
        plgpu.griddepcontrol_wait()
    b, first, splits = (split_rows_gmem[place, column] for column in range(3))

    @pl.when(splits > 1)
    def _add_up():
        inside = [splits > s for s in range(shares)]
        at = [first + jnp.where(one, np.int32(s), np.int32(0)) for s, one in enumerate(inside)]
        ms = [
            jnp.where(one, m_gmem[s, j, row], -jnp.inf) for s, one in zip(at, inside, strict=True)
        ]
        most = functools.reduce(jnp.maximum, ms)
        weights = [jnp.exp2(one - most) for one in ms]
        total = sum(w * total_gmem[s, j, row] for w, s in zip(weights, at, strict=True))
        acc = sum(w * acc_gmem[s, j, row] for w, s in zip(weights, at, strict=True))
        acc = acc / jnp.where(total == 0.0, 1.0, total)
        token, head = lax.div(row, group), j * group + lax.rem(row, group)
        out_gmem[b, token, head] = acc.astype(out_gmem.dtype)
