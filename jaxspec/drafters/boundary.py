"""Rows that a multi-layer drafter makes again, once the tokens behind them are known."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.kv_pages import kv_locs_at, to_null_page
from jaxspec.drafters.base import IngestBatch
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Block


class Boundary(NamedTuple):
    """The last W rows that each slot has ingested, whose KV is not final in every layer.

    Leaves [S+1, ...]; entry k is the row of position end - W + k, and the last `count` entries
    hold something; W is one less than the layers.

    next_ids: token_dtype[., W] the token after each. features: [., W, E]. end: i32[.] the position
    behind the last. count: i32[.].
    """

    next_ids: jax.Array
    features: jax.Array
    end: jax.Array
    count: jax.Array


class Window(NamedTuple):
    """Rows to run through all layers: those kept from before, then those just committed.

    block: where they are; rows that are not valid or not this tile's to write go to the null page.
    next_ids: token_dtype[B, W + T]. features: [B, W + T, E]. num_valid: i32[B].
    """

    block: Block
    next_ids: jax.Array
    features: jax.Array
    num_valid: jax.Array


def init_boundary(num_slots: int, num_kept: int, width: int, dtype: jnp.dtype) -> Boundary:
    """Builds the boundary of slots that keep nothing yet."""
    rows = num_slots + 1
    return Boundary(
        next_ids=jnp.zeros((rows, num_kept), token_dtype()),
        features=jnp.zeros((rows, num_kept, width), dtype),
        end=jnp.zeros((rows,), jnp.int32),
        count=jnp.zeros((rows,), jnp.int32),
    )


def widen(boundary: Boundary, batch: IngestBatch, page_size: int) -> tuple[Window, Boundary]:
    """Puts the kept rows in front of a batch's, and keeps the last rows for the next time.

    Of a prompt's tiles in one batch, each begins with the last rows of the one before it, which
    leaves their KV to it: its tokens are known further.

    Example, W = 2, a tile of rows 4..7 with 3 valid: the window is rows 2..7, of which 2..6 are
    valid, and rows 5 and 6 are kept. At the beginning of a prompt the window is rows 0..5 with 0..2
    valid, since there is nothing in front; behind pages of the prefix cache too, whose rows are
    final in every layer.

    Raises:
        ValueError: a tile shorter than the rows to keep.
    """
    num_kept = boundary.next_ids.shape[1]
    rows, block, width = batch.rows, batch.block, batch.next_ids.shape[1]
    if width < num_kept:
        raise ValueError(
            f"a prefill tile of {width} tokens is shorter than the {num_kept} rows that "
            f"{num_kept + 1} drafter layers need of it; lower block_size to {width + 2}"
        )
    goes_on = (rows == jnp.roll(rows, 1)) & (rows != 0) & (jnp.arange(len(rows)) > 0)
    is_followed = jnp.roll(goes_on, -1)
    tail = slice(width - num_kept, width)

    def in_front(kept: jax.Array, values: jax.Array) -> jax.Array:
        of_tile_before = jnp.roll(values[:, tail], 1, axis=0)
        chosen = goes_on.reshape(-1, *[1] * (values.ndim - 1))
        return jnp.concatenate([jnp.where(chosen, of_tile_before, kept[rows]), values], axis=1)

    # A row that commits nothing may have lost its pages to another request.
    kept = (boundary.end[rows] == block.lens) & ~batch.is_first
    known = jnp.where(kept, boundary.count[rows], 0)
    num_front = jnp.where(goes_on, num_kept, known)
    num_front = jnp.where(batch.num_valid == 0, 0, num_front).astype(jnp.int32)
    num_valid = num_front + batch.num_valid
    column = jnp.arange(num_kept + width, dtype=jnp.int32)[None, :]
    source = jnp.minimum(column + (num_kept - num_front)[:, None], num_kept + width - 1)
    next_ids = jnp.take_along_axis(in_front(boundary.next_ids, batch.next_ids), source, axis=1)
    features = jnp.take_along_axis(
        in_front(boundary.features, batch.features), source[:, :, None], axis=1
    )
    lens = block.lens - num_front
    positions = lens[:, None] + column
    num_own = num_valid - jnp.where(is_followed, num_kept, 0)
    kv_locs = kv_locs_at(block.page_table, positions, page_size)
    window = Window(
        block=block.replace(
            token_ids=next_ids,
            positions=positions,
            kv_locs=to_null_page(kv_locs, column < num_own[:, None], page_size),
            lens=lens,
        ),
        next_ids=next_ids,
        features=features,
        num_valid=num_valid,
    )
    return window, _keep(boundary, batch, window, is_followed)


def _keep(
    boundary: Boundary, batch: IngestBatch, window: Window, is_followed: jax.Array
) -> Boundary:
    """The boundary after a batch: of each request the last rows of its last tile."""
    num_kept, num_rows = boundary.next_ids.shape[1], len(boundary.end)
    settles = (batch.num_valid > 0) & ~is_followed & (batch.rows != 0)
    rows = jnp.where(settles, batch.rows, num_rows)  # past the end: dropped
    column = jnp.arange(num_kept, dtype=jnp.int32)[None, :]
    source = jnp.maximum(window.num_valid[:, None] - num_kept + column, 0)
    values = Boundary(
        next_ids=jnp.take_along_axis(window.next_ids, source, axis=1),
        features=jnp.take_along_axis(window.features, source[:, :, None], axis=1),
        end=batch.block.lens + batch.num_valid,
        count=jnp.minimum(window.num_valid, num_kept),
    )
    return jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), boundary, values)
