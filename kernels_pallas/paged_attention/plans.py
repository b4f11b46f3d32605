"""Which program reads which part of which row: so that ragged batches fill the device evenly."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Plan(NamedTuple):
    """S = B + shares - 1 programs a KV head, and at most Z rows that several of them share.

    It depends on lengths alone: of the calls of all layers in one jitted program XLA keeps one.
    """

    programs: jax.Array  # i32[S, 4] row, split of it, splits it has (0: idle), its length
    split_rows: jax.Array  # i32[Z, 3] row, its first program, splits it has (0: none)


def make_plan(
    lens: jax.Array,
    *,
    block: int,
    window: int | None,
    tile: int,
    reach: int,
    shares: int,
    least_tiles: int = 1,
) -> Plan:
    """Cuts long rows so that every program gets about one share of the batch's KV.

    Equal rows that fill the device stay whole; a long row among short ones is split: with 8, 8 and
    64 tiles in 10 shares, programs 0 and 1 take a row each and 2 to 9 the eighths of the third.

    Args:
      lens: i32[B] rows of KV before the block.
      block: tokens of the block.
      window: as in `paged_attention`.
      tile: rows of KV of one step.
      reach: rows of KV that the page table reaches.
      shares: the parts into which the batch's KV is cut.
      least_tiles: of a part, where a row has so many.
    """
    batch = lens.shape[0]
    end = (jnp.minimum(lens + block, reach) + (tile - 1)) // tile
    first = 0 if window is None else jnp.maximum(lens - (window - 1), 0) // tile
    tiles = jnp.maximum(end - first, 1)
    all_tiles = jnp.sum(tiles, dtype=jnp.int32)
    # Rounded to the nearest: the sum of a share rounded, but at least one, is below B + shares.
    splits = (2 * shares * tiles + all_tiles) // (2 * all_tiles)
    splits = jnp.clip(splits, 1, (tiles + (least_tiles - 1)) // least_tiles)
    each = (tiles + splits - 1) // splits
    splits = (tiles + each - 1) // each  # those that get a tile
    row = jnp.arange(batch, dtype=jnp.int32)
    ends = _sums_up_to(splits)

    program = jnp.arange(batch + shares - 1, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= program[:, None], axis=1, dtype=jnp.int32)
    busy, owner = owner < batch, jnp.minimum(owner, batch - 1)
    programs = jnp.stack(
        [
            owner,
            program - (ends - splits)[owner],
            jnp.where(busy, splits[owner], 0),
            lens[owner],
        ],
        axis=1,
    )

    # A row of two splits or more has at least one and a half shares.
    place = jnp.arange(min(batch, max(1, 2 * shares // 3)), dtype=jnp.int32)
    is_split = splits > 1
    rank = _sums_up_to(is_split.astype(jnp.int32)) - 1
    here = is_split[None, :] & (rank[None, :] == place[:, None])
    split_rows = jnp.stack(
        [
            jnp.sum(jnp.where(here, values[None, :], 0), axis=1, dtype=jnp.int32)
            for values in (row, ends - splits, splits)
        ],
        axis=1,
    )
    return Plan(programs, split_rows)


def _sums_up_to(x: jax.Array) -> jax.Array:
    """The running sum, as one small reduction."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    up_to = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(up_to, x[None, :], 0), axis=1, dtype=jnp.int32)
