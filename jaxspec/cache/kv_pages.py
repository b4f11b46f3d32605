"""Where a token's KV lives in the pages; the arrays are `[P, 2, J, G, D]`, one a layer."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

NULL_PAGE = 0  # a real page that no request owns: where padding is written


class KVSizes(Protocol):
    """What the config of a target or a drafter says of its KV."""

    num_kv_heads: int
    head_dim: int


def kv_bytes_per_token(sizes: KVSizes, num_layers: int, dtype: str) -> int:
    """Bytes that K and V of a token take in so many layers."""
    return 2 * num_layers * sizes.num_kv_heads * sizes.head_dim * jnp.dtype(dtype).itemsize


def kv_locs_at(page_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Flat KV rows of absolute positions: page * page_size + offset.

    page_table: i32[B, M]. positions: i32[B, N]; one past the table goes to the null page.
    Example, page_size 4, table [7, 3]: positions 2, 3, 4, 8 -> rows 30, 31, 12, 0.
    """
    column = positions // page_size
    inside = column < page_table.shape[1]
    pages = jnp.take_along_axis(page_table, jnp.where(inside, column, 0), axis=1)
    return jnp.where(inside, pages, NULL_PAGE) * page_size + positions % page_size


def to_null_page(kv_locs: jax.Array, keep: jax.Array, page_size: int) -> jax.Array:
    """Sends the rows where `keep` is False to the null page, at their own offset."""
    return jnp.where(keep, kv_locs, kv_locs % page_size)
