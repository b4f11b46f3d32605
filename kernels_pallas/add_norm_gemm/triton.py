"""`add_norm_gemm` in Pallas-Triton: each program norms all rows itself, while its weights come.

A launch of a narrow model takes two microseconds whatever it does, so that a norm computed again in
every program costs less than a launch of its own. All columns are in registers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.early_launch import program_id

MAX_ROWS = 16
MAX_WIDTH = 1024
_LEAST_TILE = 64


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_n: int  # weight rows of one program, a power of two; on tensor cores at least 16
    num_warps: int
    tensor_cores: bool  # or one row after the other, multiplied and summed


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows num_rows and width.
    """
    for name, limit in (("num_rows", MAX_ROWS), ("width", MAX_WIDTH)):
        if shapes.get(name, 1) > limit:
            return f"{name}={shapes[name]} is above {limit}"
    return dispatch.refuses_triton(device)


def choose(num_rows: int) -> Config:
    """The launch for a product."""
    return Config(8, 4, False) if num_rows == 1 else Config(16, 4, True)


def parts_of(width: int) -> list[tuple[int, int]]:
    """(first, size) of parts of the columns, powers of two: 512 and 64 of 576, not 1,024."""
    parts, first = [], 0
    while first < width:
        size = max(pl.next_power_of_2(width - first + 1) // 2, _LEAST_TILE)
        parts.append((first, size))
        first += size
    return parts


def add_norm_gemm(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    layer: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
    early_launch: bool = False,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `add_norm_gemm`. Grid: (tiles of outputs,)."""
    num_rows = x.shape[0]
    outputs = weight.shape[0] // (2 if swiglu else 1)
    config = choose(num_rows) if config is None else config
    return pl.pallas_call(
        functools.partial(
            _kernel, eps=eps, swiglu=swiglu, config=config, early_launch=early_launch
        ),
        name="add_norm_gemm",
        grid=(-(-outputs // config.tile_n),),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((num_rows, outputs), x.dtype),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(x, delta, norm, weight, () if layer is None else (layer,))


def _kernel(
    x_ref,  # [M, E]
    delta_ref,  # [M, E]
    norm_ref,  # [E], or [L, E]
    weight_ref,  # [out, E]; with swiglu [2 out, E], the gate's rows first
    layer_refs,  # () or (i32[1],)
    total_ref,  # [M, E]
    out_ref,  # [M, out]
    *,
    eps,
    swiglu,
    config,
    early_launch,
):
    outputs = out_ref.shape[1]
    program = program_id(0, early_launch)
    column = program * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
    weight_rows = [column + part * outputs for part in range(2 if swiglu else 1)]
    args = (x_ref, delta_ref, norm_ref, weight_ref, layer_refs, total_ref)
    for row, inside, (out, *up) in normed_products(
        program, *args, weight_rows, column < outputs, eps=eps, config=config
    ):
        if swiglu:
            out = out / (1.0 + jnp.exp(-out)) * up[0]
        mask = inside[:, None] & (column < outputs)[None, :]
        at = out_ref.at[row[:, None], column[None, :]]
        pltriton.store(at, out.astype(out_ref.dtype), mask=mask)


def normed_products(
    program,
    x_ref,  # [M, E]
    delta_ref,  # [M, E]
    norm_ref,  # [E], or [L, E]
    weight_ref,  # [out, E]
    layer_refs,  # () or (i32[1],)
    total_ref,  # [M, E], which the first program writes
    weight_rows,  # a list of i32[tile_n]
    of_weight,  # bool[tile_n] which of them there are
    *,
    eps,
    config,
) -> Iterator[tuple[jax.Array, jax.Array, list[jax.Array]]]:
    """Yields (rows of x, which of them there are, f32[rows, tile_n] for each of weight_rows)."""
    num_rows, width = x_ref.shape
    layer = tuple(pltriton.load(ref.at[jnp.int32(0)]) for ref in layer_refs)
    parts = parts_of(width) if config.tensor_cores else [(0, pl.next_power_of_2(width))]
    tiles = [first + jnp.arange(size, dtype=jnp.int32) for first, size in parts]
    tile_m = max(16, pl.next_power_of_2(num_rows)) if config.tensor_cores else 1

    def load(ref, rows, inside, k):
        mask = inside[:, None] & (k < width)[None, :]
        return pltriton.load(ref.at[rows[:, None], k[None, :]], mask=mask, other=0.0)

    # All of them first: they come from memory, the rows from L2.
    weights = [[load(weight_ref, rows, of_weight, k) for k in tiles] for rows in weight_rows]
    norms = [pltriton.load(norm_ref.at[(*layer, k)], mask=k < width, other=0.0) for k in tiles]

    for first in range(0, num_rows, tile_m):
        row = first + jnp.arange(tile_m, dtype=jnp.int32)
        inside = row < num_rows
        totals = [
            sum(load(ref, row, inside, k).astype(jnp.float32) for ref in (x_ref, delta_ref))
            for k in tiles
        ]

        @pl.when(program == 0)
        def _store_sum(row=row, inside=inside, totals=totals):
            for k, total in zip(tiles, totals, strict=True):
                at = total_ref.at[row[:, None], k[None, :]]
                mask = inside[:, None] & (k < width)[None, :]
                pltriton.store(at, total.astype(total_ref.dtype), mask=mask)

        mean = sum(jnp.sum(total * total, axis=1, keepdims=True) for total in totals) / width
        factor = jax.lax.rsqrt(mean + eps)
        sums = [0.0] * len(weights)
        for t, (total, norm) in enumerate(zip(totals, norms, strict=True)):
            normed = total * factor * norm.astype(jnp.float32)[None, :]
            normed = normed.astype(x_ref.dtype)
            sums = [
                acc + _product(normed, of_part[t], config.tensor_cores)
                for acc, of_part in zip(sums, weights, strict=True)
            ]
        yield row, inside, sums


def _product(x: jax.Array, weight: jax.Array, tensor_cores: bool) -> jax.Array:
    """x @ weight.T in f32; a single x without tensor cores, which would take sixteen."""
    if not tensor_cores:
        return jnp.sum(x.astype(jnp.float32) * weight.astype(jnp.float32), axis=1)[None, :]
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.dot(x, weight.T, precision=precision, preferred_element_type=jnp.float32)
