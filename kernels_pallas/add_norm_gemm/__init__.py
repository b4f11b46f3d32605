"""Between two sublayers of a narrow model: add to the residual stream, norm, multiply, in one.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.add_norm_gemm import reference, triton
from kernels_pallas.add_norm_gemm.triton import MAX_ROWS

__all__ = ["MAX_ROWS", "add_norm_gemm"]

BACKENDS = {"triton": triton.refuses}


def add_norm_gemm(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    layer: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    swiglu: bool = False,
    early_launch: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns x + delta, and `few_row_gemm` of that sum's RMSNorm: as `add_rms_norm` before it.

    The sum is normed in f32 and the normed rows are rounded once, before the product.

    Args:
      x: [M, E] the residual stream of few rows.
      delta: [M, E] what a sublayer adds to it.
      norm: [E] weight of the norm, or with `layer` [L, E]: a slice of it would be a copy first.
      weight: [out, E], or with `swiglu` [2 out, E], the gate's rows first.
      layer: i32[1] which of the norms, or None.
      eps: added to the mean square.
      swiglu: whether the two halves of the product are gate and up.
      early_launch: see `kernels_pallas.early_launch`.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      The sum [M, E] and the product [M, out], in x's dtype.
    """
    chex.assert_rank(x, 2)
    chex.assert_equal_shape([x, delta])
    width = x.shape[1]
    if layer is None:
        chex.assert_shape(norm, (width,))
    else:
        chex.assert_shape(norm, (None, width))
        chex.assert_shape(layer, (1,))
        chex.assert_type(layer, jnp.int32)
    chex.assert_shape(weight, (None, width))
    chex.assert_is_divisible(weight.shape[0], 2 if swiglu else 1)
    chex.assert_type([delta, weight], x.dtype)
    match dispatch.parse("add_norm_gemm", implementation):
        case "triton", interpret:
            run = functools.partial(
                triton.add_norm_gemm,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case _:
            run = reference.add_norm_gemm
    return run(x, delta, norm, weight, layer, eps=eps, swiglu=swiglu)
