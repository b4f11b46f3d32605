"""A matrix product of few rows that streams the weight once, with what follows it.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax

from kernels_pallas import dispatch
from kernels_pallas.few_row_gemm import reference, triton
from kernels_pallas.few_row_gemm.triton import MAX_ROWS

__all__ = ["MAX_ROWS", "few_row_gemm"]

BACKENDS = {"triton": triton.refuses}


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    *,
    swiglu: bool = False,
    early_launch: bool = False,
    implementation: str = "xla",
) -> jax.Array:
    """Returns epilogue(x @ weight.T), accumulated in f32 and rounded once.

    The epilogue is, with `swiglu`, silu(gate) * up of the product's two halves, then the sum with
    `residual`.

    Args:
      x: [M, E] few rows: decode and verify of a batch.
      weight: [out, E], or with `swiglu` [2 out, E], the gate's rows first.
      residual: [M, out] added to the result, or None.
      swiglu: whether the two halves of the product are gate and up.
      early_launch: see `kernels_pallas.early_launch`.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      [M, out] in x's dtype.
    """
    num_rows, width = x.shape
    chex.assert_shape(weight, (None, width))
    parts = 2 if swiglu else 1
    chex.assert_is_divisible(weight.shape[0], parts)
    chex.assert_type(weight, x.dtype)
    if residual is not None:
        chex.assert_shape(residual, (num_rows, weight.shape[0] // parts))
        chex.assert_type(residual, x.dtype)
    match dispatch.parse("few_row_gemm", implementation):
        case "triton", interpret:
            run = functools.partial(
                triton.few_row_gemm,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case _:
            run = reference.few_row_gemm
    return run(x, weight, residual, swiglu=swiglu)
