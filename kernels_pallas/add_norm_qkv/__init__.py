"""A narrow layer up to its attention in one: add, norm, project, rotate, write K and V into pages.

For models without norms of the heads. Read `reference.py`, then `triton.py`; `cases.py` names the
shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.add_norm_qkv import reference, triton

__all__ = ["add_norm_qkv"]

BACKENDS = {"triton": triton.refuses}


def add_norm_qkv(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    layer: jax.Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    early_launch: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x + delta, and what `kv_write` makes of `add_norm_gemm`'s product with `weight`.

    The product is rounded to x's dtype before it is rotated.

    Args:
      x: [M, E] the residual stream of B * N = M few rows.
      delta: [M, E] what a sublayer adds to it.
      norm: [E], or with `layer` [L, E].
      weight: [(H + 2 J) * D, E] rows of the q heads, then of the k heads, then of the v heads.
      kv_pages: [P, 2, J, G, D]; written in place when the caller donates it.
      kv_locs: i32[B, N] as of `kv_write`.
      positions: i32[B, N] absolute positions.
      inv_freq: f32[D / 2] rotary frequencies, any scaling applied.
      layer: i32[1] which of the norms, or None.
      num_heads: H.
      num_kv_heads: J.
      eps: added to the mean square.
      early_launch: see `kernels_pallas.early_launch`.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      The sum [M, E], q [B, N, H, D], both of x's dtype, and kv_pages.
    """
    chex.assert_rank(x, 2)
    chex.assert_equal_shape([x, delta])
    num_rows, width = x.shape
    if layer is None:
        chex.assert_shape(norm, (width,))
    else:
        chex.assert_shape(norm, (None, width))
        chex.assert_shape(layer, (1,))
        chex.assert_type(layer, jnp.int32)
    chex.assert_shape(kv_pages, (None, 2, num_kv_heads, None, None))
    dim = kv_pages.shape[-1]
    chex.assert_shape(weight, ((num_heads + 2 * num_kv_heads) * dim, width))
    chex.assert_equal_shape([kv_locs, positions])
    chex.assert_equal(kv_locs.size, num_rows)
    chex.assert_type([kv_locs, positions], jnp.int32)
    chex.assert_shape(inv_freq, (dim // 2,))
    chex.assert_type(inv_freq, jnp.float32)
    chex.assert_type([delta, weight], x.dtype)
    match dispatch.parse("add_norm_qkv", implementation):
        case "triton", interpret:
            run = functools.partial(
                triton.add_norm_qkv,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case _:
            run = reference.add_norm_qkv
    return run(
        x,
        delta,
        norm,
        weight,
        kv_pages,
        kv_locs,
        positions,
        inv_freq,
        layer,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        eps=eps,
    )
