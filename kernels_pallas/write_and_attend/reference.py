"""`write_and_attend` in plain jnp: the specification."""

from __future__ import annotations

import jax

from kernels_pallas.kv_write.reference import kv_write
from kernels_pallas.paged_attention.reference import paged_attention


def write_and_attend(
    qkv: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    layer: jax.Array | None,
    eps: float,
    causal: bool,
    window: int | None,
    scale: float,
    block_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `write_and_attend`."""
    q, kv_pages = kv_write(
        qkv,
        kv_pages,
        kv_locs,
        positions,
        inv_freq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        layer=layer,
        eps=eps,
    )
    out = paged_attention(
        q,
        kv_pages,
        page_table,
        lens,
        causal=causal,
        window=window,
        scale=scale,
        block_mask=block_mask,
    )
    return out, kv_pages
