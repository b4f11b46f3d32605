"""`few_row_gemm` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    squares: jax.Array | None = None,
    next_norm: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    swiglu: bool,
    num_parts: int = 1,
    eps: float = 1e-6,
    sum_columns: int = 0,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """See `few_row_gemm`."""
    if num_parts > 1:
        x, weight = (each.reshape(each.shape[0], num_parts, -1) for each in (x, weight))
        return jnp.einsum("mpk,npk->pmn", x, weight, preferred_element_type=jnp.float32)
    out = jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)
    if squares is not None:
        mean = jnp.sum(squares, axis=0) / x.shape[1]
        out = out * jax.lax.rsqrt(mean + eps)[:, None]
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    if next_norm is None:
        return out.astype(x.dtype)
    norm = (next_norm if layer is None else next_norm[layer[0]]).astype(jnp.float32)
    ends = range(sum_columns or out.shape[1], out.shape[1], sum_columns or out.shape[1])
    tiles = jnp.split(out, list(ends), axis=1)
    sums = jnp.stack([jnp.sum(tile * tile, axis=1) for tile in tiles])
    return out.astype(x.dtype), (out * norm[None, :]).astype(x.dtype), sums
