"""A drafter's context as K and V: norm and rotate k, write k and v into every layer's pages.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.kv_write_context import reference, triton

__all__ = ["kv_write_context"]

BACKENDS = {"triton": triton.refuses}


def kv_write_context(
    kv: jax.Array,
    kv_pages: tuple[jax.Array, ...],
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """Returns every layer's pages with the context's K and V written.

    A DFlash drafter projects one context vector a token to K and V of all its layers at once; k is
    then normed and rotated as in `kv_write`, v written as it is.

    Args:
        kv: [B, N, L, 2, J, D] the projected context: per layer the k heads, then the v heads.
        kv_pages: L arrays [P, 2, J, G, D]; written in place when the caller donates them.
        kv_locs: i32[B, N] flat rows to write, the same in every layer; rows of page 0 may collide.
        positions: i32[B, N] absolute positions.
        inv_freq: f32[D / 2] rotary frequencies, any scaling applied.
        k_norm: [L, D] weights of the key heads' norm, or None for no norm.
        eps: added to the mean square.
        implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
        kv_pages.
    """
    batch, block, layers, _, kv_heads, dim = kv.shape
    chex.assert_axis_dimension(kv, 3, 2)
    chex.assert_equal(len(kv_pages), layers)
    chex.assert_equal_shape(kv_pages)
    chex.assert_shape(kv_pages, (None, 2, kv_heads, None, dim))
    chex.assert_type(kv_pages, kv_pages[0].dtype)
    chex.assert_shape([kv_locs, positions], (batch, block))
    chex.assert_type([kv_locs, positions], jnp.int32)
    chex.assert_shape(inv_freq, (dim // 2,))
    chex.assert_type(inv_freq, jnp.float32)
    if k_norm is not None:
        chex.assert_shape(k_norm, (layers, dim))
    match dispatch.parse("kv_write_context", implementation):
        case "triton", interpret:
            run = functools.partial(triton.kv_write_context, interpret=interpret)
        case _:
            run = reference.kv_write_context
    return run(kv, kv_pages, kv_locs, positions, inv_freq, k_norm=k_norm, eps=eps)
