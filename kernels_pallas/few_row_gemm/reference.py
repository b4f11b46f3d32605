"""`few_row_gemm` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
) -> jax.Array:
    """See `few_row_gemm`."""
    dtype = x.dtype
    if norm is not None:
        x = rms_norm(x, norm, eps)
    out = jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of each row in f32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)[None, :]).astype(x.dtype)
