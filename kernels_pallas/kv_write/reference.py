"""`kv_write` in plain jnp: the specification, and the path where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write(
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
    layer: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See `kv_write`."""
    if layer is not None:
        q_norm, k_norm = (None if w is None else w[layer[0]] for w in (q_norm, k_norm))
    batch, block, _ = qkv.shape
    heads = qkv.reshape(batch, block, num_heads + 2 * num_kv_heads, -1)
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=2)
    qk = jnp.concatenate([norm(q, q_norm, eps), norm(k, k_norm, eps)], axis=2)
    q, k = jnp.split(rotate(qk, positions, inv_freq), [num_heads], axis=2)
    return q.astype(qkv.dtype), write_rows(kv_pages, kv_locs, k, v)


def norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """RMSNorm over each head of x[B, N, heads, D], in f32; without a weight only the cast."""
    x = x.astype(jnp.float32)
    if weight is None:
        return x
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * _as_last_axis(weight.astype(jnp.float32), x.ndim)


def rotate(x: jax.Array, positions: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Rotates x[B, N, heads, D] by halves."""
    angles = positions.astype(jnp.float32)[..., None, None] * _as_last_axis(inv_freq, x.ndim)
    # The whole-width form: of the ones tried, XLA:CPU computes only here each cosine once, for all
    # heads and all layers, and not again in every fused consumer.
    cos = jnp.concatenate([jnp.cos(angles)] * 2, axis=-1)
    sin = jnp.concatenate([-jnp.sin(angles), jnp.sin(angles)], axis=-1)
    return x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin


def _as_last_axis(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - 1) + x.shape)


def write_rows(kv_pages: jax.Array, kv_locs: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Puts k and v [B, N, J, D] at the flat rows `kv_locs` of kv_pages."""
    page_size = kv_pages.shape[3]
    locs = kv_locs.reshape(-1)
    kv = jnp.stack([k.astype(kv_pages.dtype), v.astype(kv_pages.dtype)], axis=2)
    kv = kv.reshape(locs.shape[0], *kv.shape[2:])
    return kv_pages.at[locs // page_size, :, :, locs % page_size].set(kv)
