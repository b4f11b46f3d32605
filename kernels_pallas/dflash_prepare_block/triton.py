"""`dflash_prepare_block` as one Pallas-Triton launch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.dflash_prepare_block.reference import PreparedBlock


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def dflash_prepare_block(
    bonus, lens, page_table, *, mask_token_id, block_size, page_size, interpret
) -> PreparedBlock:
    """See `dflash_prepare_block`. Grid: (B,); a lane holds one position of the block."""

    def kernel(bonus_ref, lens_ref, page_table_ref, *block_refs):
        b = pl.program_id(0)
        write_block(
            b,
            pltriton.load(bonus_ref.at[b]),
            pltriton.load(lens_ref.at[b]),
            page_table_ref,
            block_refs,
            mask_token_id=mask_token_id,
            page_size=page_size,
        )

    return PreparedBlock(
        *pl.pallas_call(
            kernel,
            name="dflash_prepare_block",
            grid=bonus.shape,
            out_shape=tuple(block_shapes(bonus.shape[0], block_size, bonus.dtype)),
            compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
        )(bonus, lens, page_table)
    )


def block_shapes(batch: int, block_size: int, token_dtype: Any) -> PreparedBlock:
    """The shapes that `write_block` fills."""
    shape = functools.partial(jax.ShapeDtypeStruct, (batch, block_size))
    return PreparedBlock(shape(token_dtype), shape(jnp.int32), shape(jnp.int32))


def write_block(b, bonus, length, page_table_ref, block_refs, *, mask_token_id, page_size):
    """Writes row b of a block inside a kernel.

    Args:
      b: the row. bonus, length: its first token and that token's position, scalars.
      page_table_ref: i32[B, M].
      block_refs: refs of block_ids, positions, kv_locs, each [B, N].
      mask_token_id, page_size: as in `dflash_prepare_block`.
    """
    block_ids_ref, positions_ref, kv_locs_ref = block_refs
    block_size, num_pages = block_ids_ref.shape[1], page_table_ref.shape[1]
    offset = jnp.arange(pl.next_power_of_2(block_size), dtype=jnp.int32)
    in_block = offset < block_size
    position = length + offset
    page_index = position // page_size
    in_table = (position >= 0) & (page_index < num_pages) & in_block
    # Page 0 is nobody's: what lies past the table may be written there and is never read.
    page = pltriton.load(page_table_ref.at[b, page_index], mask=in_table, other=0)
    block_ids = jnp.where(offset == 0, bonus, jnp.asarray(mask_token_id, bonus.dtype))
    pltriton.store(block_ids_ref.at[b, offset], block_ids, mask=in_block)
    pltriton.store(positions_ref.at[b, offset], position, mask=in_block)
    kv_loc = page * page_size + position % page_size
    pltriton.store(kv_locs_ref.at[b, offset], kv_loc, mask=in_block)
