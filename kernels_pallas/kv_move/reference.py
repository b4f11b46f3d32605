"""`kv_move` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_move(
    kv_pages: tuple[jax.Array, ...], sources: jax.Array, places: jax.Array
) -> tuple[jax.Array, ...]:
    """See `kv_move`."""
    num_pages, _, _, page_size, _ = kv_pages[0].shape
    from_page, from_offset = sources // page_size, sources % page_size
    # One past the last page: dropped.
    to_page = jnp.where(places < page_size, num_pages, places // page_size)
    to_offset = places % page_size

    def move(pages: jax.Array) -> jax.Array:
        rows = pages[from_page, :, :, from_offset]
        return pages.at[to_page, :, :, to_offset].set(rows, mode="drop")

    return tuple(move(pages) for pages in kv_pages)
