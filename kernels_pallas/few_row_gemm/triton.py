"""`few_row_gemm` in Pallas-Triton: each program streams its rows of the weight once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.few_row_gemm import reference

MAX_ROWS = 64


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_n: int  # rows of the weight of one program
    tile_k: int  # columns of one step
    splits: int  # programs that share the columns
    num_warps: int
    num_stages: int
    weight_first: bool = False  # which operand the tensor cores take as their rows
    evict_first: bool = True


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None; it knows num_rows."""
    if shapes.get("num_rows", 1) > MAX_ROWS:
        return f"num_rows={shapes['num_rows']} is above {MAX_ROWS}"
    return dispatch.refuses_triton(device)


def choose(outputs: int, width: int, itemsize: int) -> Config:
    """The launch for a product's sizes; see NOTES.md for the sweep on an H200."""
    del width
    if itemsize > 2:
        return Config(32, 64, 1, 4, 3)
    if outputs >= 6144:
        return Config(64, 128, 1, 4, 5, weight_first=True)
    return Config(32, 256, 1, 4, 6)


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `few_row_gemm`. Grid: (tiles of weight rows, splits)."""
    num_rows, width = x.shape
    if norm is not None and x.dtype == jnp.float16:
        # The kernel applies the norm's factor after the product, and x * norm may leave float16.
        x, norm = reference.rms_norm(x, norm, eps), None
    outputs = weight.shape[0] // (2 if swiglu else 1)
    parts = 2 if swiglu else 1
    tile_m = max(16, pl.next_power_of_2(num_rows))
    if config is None:
        config = choose(outputs, width, x.dtype.itemsize)
    norms = () if norm is None else (norm,)
    residuals = () if residual is None else (residual,)
    out_shape = jax.ShapeDtypeStruct((num_rows, outputs), x.dtype)
    partial_shape = (
        jax.ShapeDtypeStruct((config.splits, parts, num_rows, outputs), jnp.float32),
        jax.ShapeDtypeStruct((config.splits, num_rows), jnp.float32),
    )
    steps = -(-width // (config.tile_k * config.splits))
    split = config.splits > 1
    out = pl.pallas_call(
        functools.partial(_kernel, eps=eps, parts=parts, tile_m=tile_m, steps=steps, config=config),
        name="few_row_gemm",
        grid=(-(-outputs // config.tile_n), config.splits),
        out_shape=partial_shape if split else out_shape,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
    )(x, weight, norms, () if split else residuals)
    if not split:
        return out
    tile = 256
    return pl.pallas_call(
        functools.partial(_merge, width=width, eps=eps, normed=bool(norms), tile=tile),
        name="few_row_gemm_merge",
        grid=(num_rows, -(-outputs // tile)),
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
    )(*out, residuals)


def _kernel(
    x_ref,  # [M, E]
    weight_ref,  # [out, E] or [2 out, E]
    norm_refs,  # ([E],) or ()
    residual_refs,  # ([M, out],) or ()
    *out_refs,  # [M, out]; or f32 [S, parts, M, out] and the sums of squares f32[S, M]
    eps,
    parts,
    tile_m,
    steps,
    config,
):
    num_rows, width = x_ref.shape
    outputs = weight_ref.shape[0] // parts
    split = pl.program_id(1)
    row = jnp.arange(tile_m, dtype=jnp.int32)
    column = pl.program_id(0) * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
    inside_m, inside_n = row < num_rows, column < outputs
    whole_k = width % (config.tile_k * config.splits) == 0
    whole_n = outputs % config.tile_n == 0

    def load_weight(part, k, inside_k):
        ref = weight_ref.at[(column + part * outputs)[:, None], k[None, :]]
        policy = "evict_first" if config.evict_first else None
        if whole_k and whole_n:
            return pltriton.load(ref, eviction_policy=policy)
        mask = inside_n[:, None] & inside_k[None, :]
        return pltriton.load(ref, mask=mask, other=0.0, eviction_policy=policy)

    def step(t, carry):
        accs, squares = carry
        k = (split * steps + t) * config.tile_k + jnp.arange(config.tile_k, dtype=jnp.int32)
        inside_k = k < width
        mask = inside_m[:, None] if whole_k else inside_m[:, None] & inside_k[None, :]
        if num_rows == tile_m and whole_k:
            x = pltriton.load(x_ref.at[row[:, None], k[None, :]])
        else:
            x = pltriton.load(x_ref.at[row[:, None], k[None, :]], mask=mask, other=0.0)
        if norm_refs:
            wide = x.astype(jnp.float32)
            squares += jnp.sum(wide * wide, axis=1)
            gain = pltriton.load(norm_refs[0].at[k], mask=None if whole_k else inside_k)
            x = (wide * gain.astype(jnp.float32)[None, :]).astype(x.dtype)
        weights = [load_weight(part, k, inside_k) for part in range(parts)]
        if config.weight_first:
            products = [_dot(w, x.T) for w in weights]
        else:
            products = [_dot(x, w.T) for w in weights]
        return tuple(acc + p for acc, p in zip(accs, products, strict=True)), squares

    shape = (config.tile_n, tile_m) if config.weight_first else (tile_m, config.tile_n)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(parts))
    carry = (zeros, jnp.zeros((tile_m,), jnp.float32))
    accs, squares = jax.lax.fori_loop(0, steps, step, carry)
    m_axis = 1 if config.weight_first else 0
    rows, columns = jnp.expand_dims(row, 1 - m_axis), jnp.expand_dims(column, m_axis)
    mask = (rows < num_rows) & (columns < outputs)
    if config.splits > 1:
        out_ref, squares_ref = out_refs
        for part, acc in enumerate(accs):
            pltriton.store(out_ref.at[split, part, rows, columns], acc, mask=mask)
        if norm_refs:
            # Every tile of outputs finds the same sums.
            pltriton.store(squares_ref.at[split, row], squares, mask=inside_m)
        return
    if norm_refs:
        factor = jax.lax.rsqrt(squares / width + eps)
        accs = tuple(acc * jnp.expand_dims(factor, 1 - m_axis) for acc in accs)
    out = accs[0] if parts == 1 else _swiglu(*accs)
    if residual_refs:
        residual = pltriton.load(residual_refs[0].at[rows, columns], mask=mask, other=0.0)
        out = out + residual.astype(jnp.float32)
    pltriton.store(out_refs[0].at[rows, columns], out.astype(out_refs[0].dtype), mask=mask)


def _merge(
    partial_ref,  # f32[S, parts, M, out]
    squares_ref,  # f32[S, M]
    residual_refs,  # ([M, out],) or ()
    out_ref,  # [M, out]
    *,
    width,
    eps,
    normed,
    tile,
):
    """Adds up the splits of one row. Grid: (M, tiles of outputs)."""
    splits, parts, _, outputs = partial_ref.shape
    m = pl.program_id(0)
    column = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    mask = column < outputs
    accs = [
        sum(
            pltriton.load(
                partial_ref.at[jnp.int32(s), jnp.int32(part), m, column], mask=mask, other=0.0
            )
            for s in range(splits)
        )
        for part in range(parts)
    ]
    if normed:
        squares = sum(pltriton.load(squares_ref.at[jnp.int32(s), m]) for s in range(splits))
        factor = jax.lax.rsqrt(squares / width + eps)
        accs = [acc * factor for acc in accs]
    out = accs[0] if parts == 1 else _swiglu(*accs)
    if residual_refs:
        residual = pltriton.load(residual_refs[0].at[m, column], mask=mask, other=0.0)
        out = out + residual.astype(jnp.float32)
    pltriton.store(out_ref.at[m, column], out.astype(out_ref.dtype), mask=mask)


def _swiglu(gate, up):
    return gate / (1.0 + jnp.exp(-gate)) * up


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
