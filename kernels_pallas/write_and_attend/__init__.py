"""`kv_write` and `paged_attention` as one: a short block writes its K and V while it attends.

Read `reference.py`, then `triton.py`; tests and `bench.py` share the shapes of `cases.py`.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.write_and_attend import reference, triton

__all__ = ["serves", "write_and_attend"]

BACKENDS = {"triton": triton.refuses}


def serves(block: int, implementation: str) -> bool:
    """Whether a kernel takes blocks of so many tokens; else `kv_write`, then `paged_attention`."""
    return implementation != dispatch.XLA and block <= triton.MAX_BLOCK


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
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 1e-6,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    block_mask: jax.Array | None = None,
    early_launch: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns `paged_attention` of the queries and pages that `kv_write` makes, and those pages.

    No row may read what another row of the batch writes: rows are requests of their own, and pages
    that they share lie before their blocks. (Tiles of one prompt are not such rows.) Each of
    `kv_locs` is where the page table puts lens[b] + i, or in page 0: of what lies past the table,
    which nobody sees, or of a row whose result nobody reads.

    Args:
        qkv: [B, N, (H + 2 J) * D], of the pages' type, as `kv_write` takes it. Padding rows hold
            anything.
        kv_pages: [P, 2, J, G, D]; written in place when the caller donates it.
        kv_locs, positions: i32[B, N], inv_freq: f32[D / 2], as `kv_write` takes them.
        page_table: i32[B, M], lens: i32[B], as `paged_attention` takes them.
        num_heads, num_kv_heads, q_norm, k_norm, layer, eps: as `kv_write` takes them.
        causal, window, scale, block_mask: as `paged_attention` takes them.
        early_launch: see `kernels_pallas.early_launch`.
        implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
        [B, N, H, D] of qkv's dtype, and kv_pages.

    Raises:
        ValueError: a window together with a block mask, or a block too long for the kernel.
    """
    batch, block, width = qkv.shape
    chex.assert_shape(kv_pages, (None, 2, num_kv_heads, None, None))
    dim = kv_pages.shape[-1]
    chex.assert_equal(width, (num_heads + 2 * num_kv_heads) * dim)
    chex.assert_is_divisible(num_heads, num_kv_heads)
    chex.assert_type(kv_pages, qkv.dtype)
    chex.assert_shape([kv_locs, positions], (batch, block))
    chex.assert_shape(page_table, (batch, None))
    chex.assert_shape(lens, (batch,))
    chex.assert_type([kv_locs, positions, page_table, lens], jnp.int32)
    chex.assert_shape(inv_freq, (dim // 2,))
    chex.assert_type(inv_freq, jnp.float32)
    for weight in (q_norm, k_norm):
        if weight is not None:
            chex.assert_shape(weight, (dim,) if layer is None else (None, dim))
    if layer is not None:
        chex.assert_shape(layer, (1,))
        chex.assert_type(layer, jnp.int32)
    if block_mask is not None:
        if window is not None:
            raise ValueError(
                f"{window=} cannot be combined with a block mask, whose bits already say what each "
                "query sees of its block; pass one of the two"
            )
        chex.assert_shape(block_mask, (batch, block, -(-block // 32)))
        chex.assert_type(block_mask, jnp.uint32)
    match dispatch.parse("write_and_attend", implementation):
        case "triton", interpret:
            if block > triton.MAX_BLOCK:
                raise ValueError(
                    f"a block of {block} tokens is above {triton.MAX_BLOCK}; take kv_write and "
                    "paged_attention"
                )
            run = functools.partial(
                triton.write_and_attend,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case _:
            run = reference.write_and_attend
    return run(
        qkv,
        kv_pages,
        kv_locs,
        positions,
        inv_freq,
        page_table,
        lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        layer=layer,
        eps=eps,
        causal=causal,
        window=window,
        scale=dim**-0.5 if scale is None else scale,
        block_mask=block_mask,
    )
