"""`add_rms_norm` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, layer: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`."""
    if layer is not None:
        weight = weight[layer[0]]
    if delta.ndim == 3:
        delta = delta.sum(axis=0)
    total = x.astype(jnp.float32) + delta.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + eps)
    normed = total * factor * weight.astype(jnp.float32)[None, :]
    return total.astype(x.dtype), normed.astype(x.dtype)
