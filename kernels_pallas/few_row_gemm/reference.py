"""`few_row_gemm` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    *,
    swiglu: bool,
    num_parts: int = 1,
) -> jax.Array:
    """See `few_row_gemm`."""
    if num_parts > 1:
        x, weight = (each.reshape(each.shape[0], num_parts, -1) for each in (x, weight))
        return jnp.einsum("mpk,npk->pmn", x, weight, preferred_element_type=jnp.float32)
    out = jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(x.dtype)
