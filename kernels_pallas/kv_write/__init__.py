"""Between the QKV projection and attention: norm q and k, rotate both, write k and v into pages.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.kv_write import reference, triton

__all__ = ["kv_write"]

BACKENDS = {"triton": triton.refuses}


def kv_write(
    qkv: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    layer: jax.Array | None = None,
    eps: float = 1e-6,
    early_launch: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns the block's queries, ready for attention, and the pages with its K and V written.

    q and k heads are normed, x * rsqrt(mean(x^2) + eps) * weight, where a weight is given, then
    rotated by halves: (a, b) -> (a cos - b sin, b cos + a sin) with the angles position * inv_freq.
    All of it in f32, rounded once. v is written as it is.

    Args:
        qkv: [B, N, (H + 2 J) * D] q heads, then k heads, then v heads.
        kv_pages: [P, 2, J, G, D]; written in place when the caller donates it.
        kv_locs: i32[B, N] flat rows to write, page * G + offset. Rows of page 0 may collide: what
            page 0 then holds is unspecified. Others are distinct.
        positions: i32[B, N] absolute positions.
        inv_freq: f32[D / 2] rotary frequencies, any scaling applied.
        num_heads: H.
        num_kv_heads: J.
        q_norm: [D] weight of the query heads' norm, or None for no norm.
        k_norm: [D] weight of the key heads' norm, or None for no norm.
        layer: None, or i32[1] which row of the norms, which are [L, D] then: a slice of them would
            be a copy first.
        eps: added to the mean square.
        early_launch: see `kernels_pallas.early_launch`.
        implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
        q [B, N, H, D] of qkv's dtype, and kv_pages.
    """
    batch, block, width = qkv.shape
    chex.assert_shape(kv_pages, (None, 2, num_kv_heads, None, None))
    dim = kv_pages.shape[-1]
    chex.assert_equal(width, (num_heads + 2 * num_kv_heads) * dim)
    chex.assert_shape([kv_locs, positions], (batch, block))
    chex.assert_type([kv_locs, positions], jnp.int32)
    chex.assert_shape(inv_freq, (dim // 2,))
    chex.assert_type(inv_freq, jnp.float32)
    for weight in (q_norm, k_norm):
        if weight is not None:
            chex.assert_shape(weight, (dim,) if layer is None else (None, dim))
    if layer is not None:
        chex.assert_shape(layer, (1,))
        chex.assert_type(layer, jnp.int32)
    match dispatch.parse("kv_write", implementation):
        case "triton", interpret:
            run = functools.partial(
                triton.kv_write, early_launch=early_launch and not interpret, interpret=interpret
            )
        case _:
            run = reference.kv_write
    return run(
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
