"""`kv_move` as one Pallas-Triton launch over all layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.kv_write.triton import refuses

__all__ = ["kv_move", "refuses"]

_TILE = 16_384  # numbers that one program holds, at 128 threads 128 in each


def kv_move(
    kv_pages: tuple[jax.Array, ...], sources: jax.Array, places: jax.Array, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """See `kv_move`. Grid: (requests, layers, tiles of heads); K and V heads stand in one line."""
    batch, width = sources.shape
    layers, (_, _, kv_heads, _, dim) = len(kv_pages), kv_pages[0].shape
    rows = pl.next_power_of_2(width)
    # Two tiles at least, so that a batch of one has enough programs.
    heads = pl.next_power_of_2(kv_heads)
    while heads > 1 and rows * heads * dim > _TILE:
        heads //= 2
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, heads=heads, interpret=interpret),
        name="kv_move",
        grid=(batch, layers, -(-2 * kv_heads // heads)),
        out_shape=tuple(jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in kv_pages),
        input_output_aliases={layer: layer for layer in range(layers)},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*kv_pages, sources, places)


def _kernel(*refs, rows, heads, interpret):
    """refs: L times pages [P, 2, J, G, D], sources and places i32[B, W], L times pages."""
    layers = len(refs) // 2 - 1
    sources_ref, places_ref = refs[layers : layers + 2]
    pages_refs = refs[layers + 2 :]  # read and written through the outputs alone
    _, _, kv_heads, page_size, dim = pages_refs[0].shape
    request, layer = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(rows, dtype=jnp.int32)
    inside = row < sources_ref.shape[1]
    source = pltriton.load(sources_ref.at[request, row], mask=inside, other=0)
    place = pltriton.load(places_ref.at[request, row], mask=inside, other=0)
    moves = (place >= page_size) & (place != source)
    head = pl.program_id(2) * heads + jnp.arange(heads, dtype=jnp.int32)
    is_v = head >= kv_heads
    half = is_v.astype(jnp.int32)[None, :, None]
    kv_head = jnp.where(is_v, head - kv_heads, head)[None, :, None]
    lane = jnp.arange(dim, dtype=jnp.int32)[None, None, :]
    mask = moves[:, None, None] & (head < 2 * kv_heads)[None, :, None]

    def at(pages_ref, flat):
        flat = flat[:, None, None]
        return pages_ref.at[flat // page_size, half, kv_head, flat % page_size, lane]

    def move(pages_ref):
        held = pltriton.load(at(pages_ref, source), mask=mask, other=0.0)
        if not interpret:
            # One thread may write what another still has to read.
            pltriton.debug_barrier()
        pltriton.store(at(pages_ref, place), held, mask=mask)

    for each, pages_ref in enumerate(pages_refs):
        pl.when(layer == each)(functools.partial(move, pages_ref))
