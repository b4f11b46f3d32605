"""What `dflash_prepare_block` means, in plain `jax.numpy`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PreparedBlock(NamedTuple):
    """A block of N tokens a row, ready for the drafter: the bonus token, then masks."""

    block_ids: jax.Array  # token_dtype[B, N]
    positions: jax.Array  # i32[B, N] absolute
    kv_locs: jax.Array  # i32[B, N] flat row, page * page_size + offset


def dflash_prepare_block(
    bonus, lens, page_table, *, mask_token_id, block_size, page_size
) -> PreparedBlock:
    num_pages = page_table.shape[1]
    offsets = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    block_ids = jnp.where(offsets == 0, bonus[:, None], jnp.asarray(mask_token_id, bonus.dtype))
    positions = lens[:, None] + offsets
    page_index = positions // page_size
    inside = (positions >= 0) & (page_index < num_pages)
    pages = jnp.take_along_axis(page_table, jnp.where(inside, page_index, 0), axis=1)
    # Page 0 is nobody's: what lies past the table may be written there and is never read.
    pages = jnp.where(inside, pages, 0)
    return PreparedBlock(block_ids, positions, pages * page_size + positions % page_size)
