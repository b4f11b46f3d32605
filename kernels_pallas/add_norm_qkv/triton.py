"""`add_norm_qkv` in Pallas-Triton: a program makes pairs of outputs that are rotated together."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.add_norm_gemm import triton as add_norm_gemm
from kernels_pallas.add_norm_gemm.triton import Config, normed_products
from kernels_pallas.early_launch import program_id
from kernels_pallas.kv_write.triton import sin_cos


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows num_rows, width and qk_norm, whether heads are normed.
    """
    if shapes.get("qk_norm"):
        return "heads are normed"
    return add_norm_gemm.refuses(device, shapes)


def choose(num_rows: int) -> Config:
    """The launch; tile_n counts pairs."""
    return Config(4, 4, False) if num_rows == 1 else Config(16, 4, True)


def add_norm_qkv(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    layer: jax.Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    early_launch: bool = False,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `add_norm_qkv`. Grid: (tiles of pairs,)."""
    num_rows, dim = x.shape[0], kv_pages.shape[-1]
    config = choose(num_rows) if config is None else config
    pairs = (num_heads + 2 * num_kv_heads) * (dim // 2)
    total, q, kv_pages = pl.pallas_call(
        functools.partial(_kernel, eps=eps, config=config, early_launch=early_launch),
        name="add_norm_qkv",
        grid=(-(-pairs // config.tile_n),),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads, dim), x.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={4: 2},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        x,
        delta,
        norm,
        weight,
        kv_pages,
        kv_locs.reshape(num_rows),
        positions.reshape(num_rows),
        inv_freq,
        () if layer is None else (layer,),
    )
    return total, q.reshape(*kv_locs.shape, num_heads, dim), kv_pages


def _kernel(
    x_ref,  # [M, E]
    delta_ref,  # [M, E]
    norm_ref,  # [E], or [L, E]
    weight_ref,  # [(H + 2 J) * D, E]
    _,  # kv_pages, written through the output
    kv_locs_ref,  # i32[M]
    positions_ref,  # i32[M]
    inv_freq_ref,  # f32[D / 2]
    layer_refs,  # () or (i32[1],)
    total_ref,  # [M, E]
    q_ref,  # [M, H, D]
    kv_ref,  # [P, 2, J, G, D]
    *,
    eps,
    config,
    early_launch,
):
    num_heads, dim = q_ref.shape[1:]
    num_kv_heads, page_size = kv_ref.shape[2:4]
    half = dim // 2
    program = program_id(0, early_launch)
    pair = program * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
    head, lane = pair // half, pair % half
    exists, is_v = head < num_heads + 2 * num_kv_heads, head >= num_heads + num_kv_heads
    is_q = head < num_heads
    kv_head = jnp.where(is_v, head - num_kv_heads, head) - num_heads
    inv_freq = pltriton.load(inv_freq_ref.at[lane], mask=exists, other=0.0)
    first = head * dim + lane
    args = (x_ref, delta_ref, norm_ref, weight_ref, layer_refs, total_ref)
    for row, inside, halves in normed_products(
        program, *args, [first, first + half], exists, eps=eps, config=config
    ):
        # Rounded as a product of its own would be.
        a, b = (x.astype(x_ref.dtype).astype(jnp.float32) for x in halves)
        position = pltriton.load(positions_ref.at[row], mask=inside, other=0)
        sin, cos = sin_cos(position.astype(jnp.float32)[:, None] * inv_freq[None, :])
        kept = is_v[None, :]
        rotated = (jnp.where(kept, a, a * cos - b * sin), jnp.where(kept, b, b * cos + a * sin))
        # Rows that are not there write nothing; the interpreter writes back what it finds, which
        # must not lie where another row writes.
        loc = pltriton.load(kv_locs_ref.at[row], mask=inside, other=page_size - 1)[:, None]
        for offset, x in zip((0, half), rotated, strict=True):
            at = (lane + offset)[None, :]
            ref = q_ref.at[row[:, None], head[None, :], at]
            mask = inside[:, None] & is_q[None, :]
            pltriton.store(ref, x.astype(q_ref.dtype), mask=mask)
            page, place = loc // page_size, loc % page_size
            ref = kv_ref.at[page, is_v.astype(jnp.int32)[None, :], kv_head[None, :], place, at]
            mask = inside[:, None] & (exists & ~is_q)[None, :]
            pltriton.store(ref, x.astype(kv_ref.dtype), mask=mask)
