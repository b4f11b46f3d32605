"""`kv_write` as one Pallas-Triton launch; its parts serve `kv_write_context` too."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.early_launch import program_id


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows head_dim, a power of two from 16 to 256 (Triton values have such sizes).
    """
    dim = shapes.get("head_dim", 128)
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head_dim={dim} is not a power of two from 16 to 256"
    return dispatch.refuses_triton(device)


class Config(NamedTuple):
    """Static choices of a launch; `choose` sets them, a sweep may try others."""

    tile_heads: int  # heads of one program, a power of two
    num_warps: int


def choose(tokens: int) -> Config:
    """Few tokens: spread the heads over programs. Many: compute each token's angles only once."""
    return Config(16, 4) if tokens < 256 else Config(64, 4)


def kv_write(
    qkv: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    layer: jax.Array | None,
    eps: float,
    early_launch: bool,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `kv_write`. Grid: (tokens, tiles of heads); q, k and v heads differ only by masks."""
    batch, block, width = qkv.shape
    tokens, heads = batch * block, num_heads + 2 * num_kv_heads
    dim = width // heads
    config = choose(tokens) if config is None else config
    tile = min(pl.next_power_of_2(heads), config.tile_heads)
    norms = tuple(() if weight is None else (weight,) for weight in (q_norm, k_norm))
    q, kv_pages = pl.pallas_call(
        functools.partial(
            _kernel, num_heads=num_heads, eps=eps, tile=tile, early_launch=early_launch
        ),
        name="kv_write",
        grid=(tokens, -(-heads // tile)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, num_heads, dim), qkv.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        qkv.reshape(tokens, heads, dim),
        kv_pages,
        kv_locs.reshape(tokens),
        positions.reshape(tokens),
        inv_freq,
        norms,
        () if layer is None else (layer,),
    )
    return q.reshape(batch, block, num_heads, dim), kv_pages


def _kernel(
    qkv_ref,  # [T, H + 2 J, D]
    _,  # kv_pages, written through the output
    kv_locs_ref,  # i32[T]
    positions_ref,  # i32[T]
    inv_freq_ref,  # f32[D / 2]
    norm_refs,  # ((q_norm,) or (), (k_norm,) or ()), [D] each, or [L, D]
    layer_refs,  # () or (i32[1],)
    q_ref,  # [T, H, D]
    kv_ref,  # [P, 2, J, G, D]
    *,
    num_heads,
    eps,
    tile,
    early_launch,
):
    heads, dim = qkv_ref.shape[1:]
    num_kv_heads, page_size = kv_ref.shape[2:4]
    # What is loaded behind a sum over threads or a store waits for it, so all loads come first.
    token = program_id(0, early_launch)
    layer = [pltriton.load(ref.at[jnp.int32(0)]) for ref in layer_refs]
    loc = pltriton.load(kv_locs_ref.at[token])
    angles = load_angles(positions_ref, token, inv_freq_ref)
    head = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    halves = load_halves(lambda lane: qkv_ref.at[token, head[:, None], lane], dim, head < heads)
    norms = [
        load_weight(lambda lane, ref=ref: ref.at[(*layer, lane)], dim)
        for refs in norm_refs
        for ref in refs
    ]
    x = halves
    if len(norms) == 2:
        weight = tuple(jnp.where(is_q[:, None], *pair) for pair in zip(*norms, strict=True))
        x = normalize(halves, weight, eps)
    elif norms:
        has_norm = is_q if norm_refs[0] else ~is_q
        normed = normalize(halves, norms[0], eps)
        x = tuple(jnp.where(has_norm[:, None], *pair) for pair in zip(normed, x, strict=True))
    x = rotate(x, angles)
    x = tuple(jnp.where(is_v[:, None], old, new) for new, old in zip(x, halves, strict=True))
    store_halves(lambda lane: q_ref.at[token, head[:, None], lane], x, is_q)
    kv_head = jnp.where(is_v, head - num_kv_heads, head) - num_heads
    store_halves(
        lambda lane: kv_ref.at[
            loc // page_size,
            is_v.astype(jnp.int32)[:, None],
            kv_head[:, None],
            loc % page_size,
            lane,
        ],
        x,
        ~is_q & (head < heads),
    )


def load_halves(at, dim, inside):
    """The two halves, f32[heads, D / 2], of the rows that `at(lane)` points to."""
    lane = jnp.arange(dim // 2, dtype=jnp.int32)[None, :]
    return tuple(
        pltriton.load(at(lane + first), mask=inside[:, None], other=0.0).astype(jnp.float32)
        for first in (0, dim // 2)
    )


def store_halves(at, halves, inside):
    """Writes both halves where `at(lane)` points to, in the type kept there."""
    half = halves[0].shape[1]
    lane = jnp.arange(half, dtype=jnp.int32)[None, :]
    for first, x in zip((0, half), halves, strict=True):
        ref = at(lane + first)
        pltriton.store(ref, x.astype(ref.dtype), mask=inside[:, None])


def load_weight(at, dim):
    """The two halves, f32[1, D / 2], of the norm's weight that `at(lane)` points to."""
    lane = jnp.arange(dim // 2, dtype=jnp.int32)
    return tuple(
        pltriton.load(at(lane + first)).astype(jnp.float32)[None, :] for first in (0, dim // 2)
    )


def normalize(halves, weight, eps):
    """RMSNorm of each row; weight: its halves, f32[1 or heads, D / 2]."""
    squares = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in halves)
    factor = jax.lax.rsqrt(squares / (2 * halves[0].shape[1]) + eps)
    return tuple(x * factor * w for x, w in zip(halves, weight, strict=True))


def load_angles(positions_ref, token, inv_freq_ref):
    """The angles position * inv_freq of a token, f32[D / 2]."""
    lane = jnp.arange(inv_freq_ref.shape[0], dtype=jnp.int32)
    position = pltriton.load(positions_ref.at[token]).astype(jnp.float32)
    return position * pltriton.load(inv_freq_ref.at[lane])


def rotate(halves, angles):
    """Rotate-half by angles f32[D / 2]."""
    first, second = halves
    sin, cos = (x[None, :] for x in sin_cos(angles))
    return first * cos - second * sin, second * cos + first * sin


def sin_cos(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of f32 angles below 2e5, to about 1e-7: a third of libdevice's instructions.

    The reduction by multiples of pi / 2 in three parts and the polynomials on [-pi / 4, pi / 4] are
    those of Cephes' sinf and cosf.
    """
    multiple = jnp.floor(x * 0.6366197723675814 + 0.5)
    r = ((x - multiple * 1.5703125) - multiple * 4.83751296997e-4) - multiple * 7.5497899548e-8
    z = r * r
    sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos = 1.0 - 0.5 * z
    cos += z * z * (4.1666645683e-2 + z * (-1.3887316255e-3 + z * 2.4433157118e-5))
    quadrant = multiple.astype(jnp.int32)
    swapped = (quadrant & 1) == 1
    sin, cos = jnp.where(swapped, cos, sin), jnp.where(swapped, sin, cos)
    sin = jnp.where((quadrant & 2) == 2, -sin, sin)
    cos = jnp.where(((quadrant + 1) & 2) == 2, -cos, cos)
    return sin, cos
