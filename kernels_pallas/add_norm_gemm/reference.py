"""`add_norm_gemm` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax

from kernels_pallas.add_rms_norm.reference import add_rms_norm
from kernels_pallas.few_row_gemm.reference import few_row_gemm


def add_norm_gemm(
    x: jax.Array,
    delta: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    layer: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `add_norm_gemm`."""
    total, normed = add_rms_norm(x, delta, norm, layer, eps=eps)
    return total, few_row_gemm(normed, weight, None, swiglu=swiglu)
