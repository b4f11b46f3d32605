"""`kv_write_context` as one Pallas-Triton launch over all layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.kv_write.triton import (
    load_angles,
    load_halves,
    load_weight,
    normalize,
    refuses,
    rotate,
    store_halves,
)

__all__ = ["kv_write_context", "refuses"]


def kv_write_context(
    kv: jax.Array,
    kv_pages: tuple[jax.Array, ...],
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    k_norm: jax.Array | None,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """See `kv_write_context`. Grid: (tokens, layers)."""
    batch, block, layers, _, kv_heads, dim = kv.shape
    tokens = batch * block
    tile = pl.next_power_of_2(2 * kv_heads)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, tile=tile),
        name="kv_write_context",
        grid=(tokens, layers),
        out_shape=tuple(jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in kv_pages),
        input_output_aliases={1 + layer: layer for layer in range(layers)},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(
        kv.reshape(tokens, layers, 2 * kv_heads, dim),
        kv_pages,
        kv_locs.reshape(tokens),
        positions.reshape(tokens),
        inv_freq,
        () if k_norm is None else (k_norm,),
    )


def _kernel(
    kv_ref,  # [T, L, 2 J, D]
    _,  # kv_pages, written through the outputs
    kv_locs_ref,  # i32[T]
    positions_ref,  # i32[T]
    inv_freq_ref,  # f32[D / 2]
    norm_refs,  # (k_norm[L, D],) or ()
    *pages_refs,  # L times [P, 2, J, G, D]
    eps,
    tile,
):
    heads, dim = kv_ref.shape[2:]
    kv_heads, page_size = pages_refs[0].shape[2:4]
    token, layer = pl.program_id(0), pl.program_id(1)
    loc = pltriton.load(kv_locs_ref.at[token])
    angles = load_angles(positions_ref, token, inv_freq_ref)
    head = jnp.arange(tile, dtype=jnp.int32)
    is_v = head >= kv_heads
    halves = load_halves(
        lambda lane: kv_ref.at[token, layer, head[:, None], lane], dim, head < heads
    )
    norms = [load_weight(lambda lane, ref=ref: ref.at[layer, lane], dim) for ref in norm_refs]
    k = halves
    for weight in norms:
        k = normalize(k, weight, eps)
    k = rotate(k, angles)
    x = tuple(jnp.where(is_v[:, None], v, k) for v, k in zip(halves, k, strict=True))

    def write(pages_ref):
        store_halves(
            lambda lane: pages_ref.at[
                loc // page_size,
                is_v.astype(jnp.int32)[:, None],
                jnp.where(is_v, head - kv_heads, head)[:, None],
                loc % page_size,
                lane,
            ],
            x,
            head < heads,
        )

    for each, pages_ref in enumerate(pages_refs):
        pl.when(layer == each)(functools.partial(write, pages_ref))
