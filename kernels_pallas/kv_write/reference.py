"""`kv_write` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reference(
    qkv: jax.Array,
    kv_pages: jax.Array,
    kv_locs: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See `kv_write`."""
    batch, block, _ = qkv.shape
    heads = qkv.reshape(batch, block, num_heads + 2 * num_kv_heads, -1)
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=2)
    cos, sin = rotary(positions, inv_freq)
    q = norm_and_rotate(q, q_norm, cos, sin, eps).astype(qkv.dtype)
    k = norm_and_rotate(k, k_norm, cos, sin, eps)
    return q, write_rows(kv_pages, kv_locs, k, v)


def rotary(positions: jax.Array, inv_freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, f32[B, N, 1, D / 2]; the axis of 1 is the heads'."""
    angles = positions.astype(jnp.float32)[..., None, None] * _as_last_axis(inv_freq, 4)
    return jnp.cos(angles), jnp.sin(angles)


def norm_and_rotate(
    x: jax.Array, weight: jax.Array | None, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    """RMSNorm over each head of x[..., heads, D], when there is a weight, then rotate-half; f32."""
    x = x.astype(jnp.float32)
    if weight is not None:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        x = x * _as_last_axis(weight.astype(jnp.float32), x.ndim)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _as_last_axis(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - 1) + x.shape)


def write_rows(kv_pages: jax.Array, kv_locs: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Puts k and v [B, N, J, D] at the flat rows `kv_locs` of kv_pages."""
    page_size = kv_pages.shape[3]
    locs = kv_locs.reshape(-1)
    kv = jnp.stack([k.astype(kv_pages.dtype), v.astype(kv_pages.dtype)], axis=2)
    kv = kv.reshape(locs.shape[0], *kv.shape[2:])
    return kv_pages.at[locs // page_size, :, :, locs % page_size].set(kv)
