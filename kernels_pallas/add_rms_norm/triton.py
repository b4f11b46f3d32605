"""`add_rms_norm` in Pallas-Triton: one program a row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.early_launch import program_id


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    layer: jax.Array | None,
    *,
    eps: float,
    early_launch: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`. Grid: (M,)."""
    tile = pl.next_power_of_2(x.shape[1])
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, tile=tile, early_launch=early_launch),
        name="add_rms_norm",
        grid=(x.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        compiler_params=pltriton.CompilerParams(
            num_warps=max(1, min(8, tile // 512)), num_stages=1
        ),
        interpret=interpret,
    )(x, delta, weight, () if layer is None else (layer,))


def _kernel(
    x_ref,  # [M, E]
    delta_ref,  # [M, E], or f32[S, M, E]
    weight_ref,  # [E], or [L, E]
    layer_refs,  # () or (i32[1],)
    total_ref,  # [M, E]
    normed_ref,  # [M, E]
    *,
    eps,
    tile,
    early_launch,
):
    row, width = program_id(0, early_launch), x_ref.shape[1]
    column = jnp.arange(tile, dtype=jnp.int32)
    inside = column < width

    def load(ref, *at):
        values = pltriton.load(ref.at[(*at, column)], mask=inside, other=0.0)
        return values.astype(jnp.float32)

    weight = load(weight_ref, *(pltriton.load(ref.at[jnp.int32(0)]) for ref in layer_refs))
    total = load(x_ref, row)
    if len(delta_ref.shape) == 2:
        total += load(delta_ref, row)
    else:
        total += sum(load(delta_ref, jnp.int32(part), row) for part in range(delta_ref.shape[0]))
    normed = total * jax.lax.rsqrt(jnp.sum(total * total) / width + eps) * weight
    for ref, values in ((total_ref, total), (normed_ref, normed)):
        pltriton.store(ref.at[row, column], values.astype(ref.dtype), mask=inside)
