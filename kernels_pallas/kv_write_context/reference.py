"""`kv_write_context` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax

from kernels_pallas.kv_write.reference import norm, rotate, write_rows


def kv_write_context(
    kv: jax.Array,
    kv_pages: tuple[jax.Array, ...],
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    k_norm: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, ...]:
    """See `kv_write_context`."""

    def write(layer: int, pages: jax.Array) -> jax.Array:
        weight = None if k_norm is None else k_norm[layer]
        k = rotate(norm(kv[:, :, layer, 0], weight, eps), positions, inv_freq)
        return write_rows(pages, kv_locs, k, kv[:, :, layer, 1])

    return tuple(write(layer, pages) for layer, pages in enumerate(kv_pages))
