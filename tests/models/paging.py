"""Blocks over paged KV for tests: where tokens of several requests live, and how they are read."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.models.base import Block


def page_tables(num_requests: int, pages_each: int, seed: int = 0) -> np.ndarray:
    """i32[requests, M] pages 1.. in random order; page 0 is nobody's."""
    pages = np.random.default_rng(seed).permutation(num_requests * pages_each) + 1
    return pages.reshape(num_requests, pages_each).astype(np.int32)


def block_at(
    token_ids: np.ndarray, lens: list[int], page_table: np.ndarray, page_size: int
) -> Block:
    """A block of N tokens a row, standing behind the `lens` rows of KV that each request has."""
    token_ids = np.asarray(token_ids, np.int32)
    positions = np.asarray(lens, np.int32)[:, None] + np.arange(token_ids.shape[1], dtype=np.int32)
    pages = np.take_along_axis(page_table, positions // page_size, axis=1)
    return Block(
        token_ids=jnp.asarray(token_ids),
        positions=jnp.asarray(positions),
        kv_locs=jnp.asarray(pages * page_size + positions % page_size),
        page_table=jnp.asarray(page_table),
        lens=jnp.asarray(lens, jnp.int32),
    )


def rows_of(kv_pages: np.ndarray, pages: np.ndarray, length: int) -> np.ndarray:
    """[2, J, length, D]: K and V of a request's first `length` positions, in order."""
    rows = np.asarray(kv_pages)[pages]
    rows = rows.transpose(1, 2, 0, 3, 4).reshape(*rows.shape[1:3], -1, rows.shape[-1])
    return rows[:, :, :length]
