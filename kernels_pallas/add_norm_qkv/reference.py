"""`add_norm_qkv` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax

from kernels_pallas.add_norm_gemm.reference import add_norm_gemm
from kernels_pallas.kv_write.reference import kv_write


def add_norm_qkv(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    layer: jax.Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `add_norm_qkv`."""
    total, qkv = add_norm_gemm(x, delta, norm, weight, layer, eps=eps, swiglu=False)
    q, kv_pages = kv_write(
        qkv.reshape(*kv_locs.shape, -1),
        kv_pages,
        kv_locs,
        positions,
        inv_freq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=None,
        k_norm=None,
        layer=None,
        eps=eps,
    )
    return total, q, kv_pages
