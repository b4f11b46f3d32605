"""What stands between two sublayers: add to the residual stream, then RMSNorm.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.add_rms_norm import reference, triton

__all__ = ["add_rms_norm"]

BACKENDS = {"triton": triton.refuses}


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    layer: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    early_launch: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns x + delta, and that sum's RMSNorm: sum * rsqrt(mean(sum^2) + eps) * weight.

    Both are computed in f32 and rounded once: the norm does not see the rounding of the sum.

    Args:
      x: [M, E] the residual stream.
      delta: [M, E] what a sublayer adds to it, or f32[S, M, E], parts of a product that are summed.
      weight: [E] of the norm, or with `layer` [L, E]: a slice of it would be a copy first.
      layer: i32[1] which of the weights, or None.
      eps: added to the mean square.
      early_launch: see `kernels_pallas.early_launch`.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      Two arrays [M, E] in x's dtype.
    """
    chex.assert_rank(x, 2)
    chex.assert_rank(delta, {2, 3})
    chex.assert_shape(delta, (..., *x.shape))
    if layer is None:
        chex.assert_shape(weight, (x.shape[1],))
    else:
        chex.assert_shape(weight, (None, x.shape[1]))
        chex.assert_shape(layer, (1,))
        chex.assert_type(layer, jnp.int32)
    chex.assert_type(delta, x.dtype if delta.ndim == 2 else jnp.float32)
    match dispatch.parse("add_rms_norm", implementation):
        case "triton", interpret:
            run = functools.partial(
                triton.add_rms_norm,
                early_launch=early_launch and not interpret,
                interpret=interpret,
            )
        case _:
            run = reference.add_rms_norm
    return run(x, delta, weight, layer, eps=eps)
