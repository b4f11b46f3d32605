"""`few_row_gemm` in Pallas-Triton: each program streams some rows of the weight, once."""

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

MAX_ROWS = 64
_WHOLE_COLUMNS = 2048  # at most, of four weight rows in registers


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_n: int  # weight rows of one program, a power of two, at least 16
    tile_k: int  # columns of one step, a power of two, at least 16
    num_warps: int
    num_stages: int
    weight_first: bool  # whether the tensor cores take the weight's rows as theirs, or x's
    splits: int = 1  # programs that share the columns; the result is then in as many parts
    whole: bool = False  # one row: all columns in registers at once, without tensor cores


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None; it knows num_rows."""
    if shapes.get("num_rows", 1) > MAX_ROWS:
        return f"num_rows={shapes['num_rows']} is above {MAX_ROWS}"
    return dispatch.refuses_triton(device)


def choose(num_rows: int, outputs: int, width: int, swiglu: bool, bits: int) -> Config:
    """The launch for a product; NOTES.md has the sweep on an H200.

    All programs should run at once, about one on each of 132 multiprocessors, each with enough
    loads under way: then the columns need not be split, which would cost a second launch.
    """
    if bits > 16:
        config = Config(32, 32, num_warps=4, num_stages=3, weight_first=False)
    elif num_rows == 1 and outputs < 2560 and width <= _WHOLE_COLUMNS:
        return Config(4, width, num_warps=4, num_stages=1, weight_first=False, whole=True)
    elif outputs < 2560:
        # A small weight: few rows a program, or too few programs share the loads.
        config = Config(16, 64, num_warps=4, num_stages=8, weight_first=False)
    elif swiglu:
        config = Config(64, 64, num_warps=4, num_stages=4, weight_first=True)
    elif width > 2 * outputs:
        config = Config(32, 256, num_warps=4, num_stages=6, weight_first=False)
    elif outputs <= 4096:
        config = Config(64, 128, num_warps=4, num_stages=8, weight_first=True)
    else:
        config = Config(64, 256, num_warps=4, num_stages=4, weight_first=True)
    rows = tile_m(num_rows) + config.tile_n * (2 if swiglu else 1)
    stages = limits.num_stages(config.num_stages, rows * config.tile_k * bits // 8)
    return config._replace(num_stages=stages)


def tile_m(num_rows: int) -> int:
    """Rows of x as the tensor cores take them."""
    return max(16, pl.next_power_of_2(num_rows))


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    *,
    swiglu: bool,
    num_parts: int = 1,
    early_launch: bool = False,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `few_row_gemm`. Grid: (tiles of outputs, splits)."""
    num_rows, width = x.shape
    outputs = weight.shape[0] // (2 if swiglu else 1)
    if config is None:
        config = choose(num_rows, outputs, width, swiglu, jnp.finfo(x.dtype).bits)
        config = config._replace(splits=num_parts)
    split = config.splits > 1
    assert not (split and (swiglu or residual is not None)), "the parts are not summed here"
    shape = jax.ShapeDtypeStruct((num_rows, outputs), x.dtype)
    parts = jax.ShapeDtypeStruct((config.splits, num_rows, outputs), jnp.float32)
    result = pl.pallas_call(
        functools.partial(
            _one_row if config.whole else _kernel,
            swiglu=swiglu,
            config=config,
            early_launch=early_launch,
        ),
        name="few_row_gemm",
        grid=(-(-outputs // config.tile_n), config.splits),
        out_shape=parts if split else shape,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
    )(x, weight, () if residual is None else (residual,))
    return result


def _kernel(
    x_ref,  # [M, E]
    weight_ref,  # [out, E]; with swiglu [2 out, E], the gate's rows first
    residual_refs,  # ([M, out],) or ()
    out_ref,  # [M, out]; with splits f32[splits, M, out]
    *,
    swiglu,
    config,
    early_launch,
):
    num_rows, width = x_ref.shape
    outputs = out_ref.shape[-1]
    row = jnp.arange(tile_m(num_rows), dtype=jnp.int32)
    first = program_id(0, early_launch) * config.tile_n
    column = first + jnp.arange(config.tile_n, dtype=jnp.int32)
    whole_m, whole_n = num_rows == row.shape[0], outputs % config.tile_n == 0
    whole_k = width % (config.tile_k * config.splits) == 0
    split, steps = pl.program_id(1), -(-width // (config.tile_k * config.splits))

    def load(ref, rows, inside, k):
        at = ref.at[rows[:, None], k[None, :]]
        # A mask that is all true still costs registers, and time in every step.
        if inside is None and whole_k:
            return pltriton.load(at)
        mask = (k < width)[None, :]
        if inside is not None:
            mask &= inside[:, None]
        return pltriton.load(at, mask=mask, other=0.0)

    def step(t, accs):
        k = (split * steps + t) * config.tile_k + jnp.arange(config.tile_k, dtype=jnp.int32)
        x = load(x_ref, row, None if whole_m else row < num_rows, k)
        sums = []
        for part, acc in enumerate(accs):
            rows = column + part * outputs
            w = load(weight_ref, rows, None if whole_n else column < outputs, k)
            sums.append(acc + (_dot(w, x.T) if config.weight_first else _dot(x, w.T)))
        return tuple(sums)

    m_axis = 1 if config.weight_first else 0
    rows, columns = jnp.expand_dims(row, 1 - m_axis), jnp.expand_dims(column, m_axis)
    shape = jnp.broadcast_shapes(rows.shape, columns.shape)
    accs = tuple(jnp.zeros(shape, jnp.float32) for _ in range(2 if swiglu else 1))
    out, *up = jax.lax.fori_loop(0, steps, step, accs)
    if swiglu:
        out = out / (1.0 + jnp.exp(-out)) * up[0]
    inside = (rows < num_rows) & (columns < outputs)
    if residual_refs:
        residual = pltriton.load(residual_refs[0].at[rows, columns], mask=inside, other=0.0)
        out = out + residual.astype(jnp.float32)
    at = (rows, columns) if config.splits == 1 else (split, rows, columns)
    pltriton.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside)


def _one_row(
    x_ref,  # [1, E]
    weight_ref,  # [out, E]; with swiglu [2 out, E], the gate's rows first
    residual_refs,  # ([1, out],) or ()
    out_ref,  # [1, out]
    *,
    swiglu,
    config,
    early_launch,
):
    width, outputs = x_ref.shape[1], out_ref.shape[1]
    column = program_id(0, early_launch) * config.tile_n
    column = column + jnp.arange(config.tile_n, dtype=jnp.int32)
    k = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    inside, zero = column < outputs, jnp.int32(0)
    weights = [
        pltriton.load(
            weight_ref.at[(column + part * outputs)[:, None], k[None, :]],
            mask=inside[:, None] & (k < width)[None, :],
            other=0.0,
        )
        for part in range(2 if swiglu else 1)
    ]
    x = pltriton.load(x_ref.at[zero, k], mask=k < width, other=0.0).astype(jnp.float32)
    out, *up = (jnp.sum(w.astype(jnp.float32) * x[None, :], axis=1) for w in weights)
    if swiglu:
        out = out / (1.0 + jnp.exp(-out)) * up[0]
    if residual_refs:
        residual = pltriton.load(residual_refs[0].at[zero, column], mask=inside, other=0.0)
        out = out + residual.astype(jnp.float32)
    pltriton.store(out_ref.at[zero, column], out.astype(out_ref.dtype), mask=inside)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b accumulated in f32; float32 operands are not cut to tf32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
