"""What stands between two sublayers: add to the residual stream, then RMSNorm.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax

from kernels_pallas import dispatch
from kernels_pallas.add_rms_norm import reference, triton

__all__ = ["add_rms_norm"]

BACKENDS = {"triton": triton.refuses}


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns x + delta, and that sum's RMSNorm: sum * rsqrt(mean(sum^2) + eps) * weight.

    Both are computed in f32 and rounded once: the norm does not see the rounding of the sum.

    Args:
      x: [M, E] the residual stream.
      delta: [M, E] what a sublayer adds to it.
      weight: [E] of the norm.
      eps: added to the mean square.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      Two arrays [M, E] in x's dtype.
    """
    chex.assert_rank(x, 2)
    chex.assert_equal_shape([x, delta])
    chex.assert_shape(weight, (x.shape[1],))
    chex.assert_type(delta, x.dtype)
    match dispatch.parse("add_rms_norm", implementation):
        case "triton", interpret:
            run = functools.partial(triton.add_rms_norm, interpret=interpret)
        case _:
            run = reference.add_rms_norm
    return run(x, delta, weight, eps=eps)
