"""What `filter_thresholds` means, in plain `jax.numpy`.

Thresholds are found bit by bit in 32 passes over the scores, so that the vocabulary is never
sorted; the passes run only while a row of the batch filters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SIGN = 1 << 31


def filter_thresholds(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    ordered = ordered_bits(scores)
    lowest = jnp.zeros((*scores.shape[:-1], 1), jnp.uint32)

    def top_k_threshold() -> jax.Array:
        def enough(kept: jax.Array) -> jax.Array:
            return kept.sum(-1, keepdims=True, dtype=jnp.int32) >= top_k[:, None, None]

        threshold = _highest_threshold(ordered, enough)
        return jnp.where(top_k[:, None, None] > 0, threshold, lowest)

    k_threshold = lax.cond(jnp.any(top_k > 0), top_k_threshold, lambda: lowest)

    def top_p_threshold() -> jax.Array:
        highest = scores.max(-1, keepdims=True)
        weights = jnp.where(ordered >= k_threshold, jnp.exp(scores - highest), 0.0)
        wanted = weights.sum(-1, keepdims=True) * top_p[:, None, None]
        wanted = jnp.maximum(wanted, jnp.finfo(jnp.float32).tiny)  # of nothing, all have enough

        def enough(kept: jax.Array) -> jax.Array:
            return jnp.where(kept, weights, 0.0).sum(-1, keepdims=True) >= wanted

        threshold = _highest_threshold(ordered, enough)
        return jnp.where(top_p[:, None, None] < 1.0, threshold, lowest)

    p_threshold = lax.cond(jnp.any(top_p < 1.0), top_p_threshold, lambda: lowest)
    return _score_of(jnp.maximum(k_threshold, p_threshold))[..., 0]


def ordered_bits(scores: jax.Array) -> jax.Array:
    """Maps f32 to u32 so that the order of the numbers is the order of the bits."""
    scores = jnp.where(scores == 0.0, 0.0, scores)  # -0.0 is the same number
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(_SIGN), ~bits, bits | jnp.uint32(_SIGN))


def _score_of(ordered: jax.Array) -> jax.Array:
    """The number of such bits; -inf of all below its bits, which are no number's."""
    sign = jnp.uint32(_SIGN)
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    score = lax.bitcast_convert_type(bits, jnp.float32)
    lowest = ordered_bits(jnp.full((), -jnp.inf, jnp.float32))
    return jnp.where(ordered < lowest, -jnp.inf, score)


def _highest_threshold(ordered: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The highest t for which `enough(ordered >= t)` holds, u32[..., 1]; 0 where none does."""

    def try_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(_SIGN) >> i.astype(jnp.uint32))
        return jnp.where(enough(ordered >= candidate), candidate, threshold)

    start = jnp.zeros((*ordered.shape[:-1], 1), jnp.uint32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(32), try_bit, start)
