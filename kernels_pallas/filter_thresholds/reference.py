"""What `filter_thresholds` means, in plain `jax.numpy`.

Thresholds are found bit by bit in 32 passes over the scores, so that the vocabulary is never
sorted; the passes run only while a row of the batch filters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

LOWEST = -(1 << 31)


def filter_thresholds(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    places = ordered(scores)
    lowest = jnp.full((*scores.shape[:-1], 1), LOWEST, jnp.int32)

    def top_k_threshold() -> jax.Array:
        def enough(kept: jax.Array) -> jax.Array:
            return kept.sum(-1, keepdims=True, dtype=jnp.int32) >= top_k[:, None, None]

        threshold = _highest_threshold(places, enough)
        return jnp.where(top_k[:, None, None] > 0, threshold, lowest)

    k_threshold = lax.cond(jnp.any(top_k > 0), top_k_threshold, lambda: lowest)

    def top_p_threshold() -> jax.Array:
        highest = scores.max(-1, keepdims=True)
        weights = jnp.where(places >= k_threshold, jnp.exp(scores - highest), 0.0)
        wanted = weights.sum(-1, keepdims=True) * top_p[:, None, None]
        wanted = jnp.maximum(wanted, jnp.finfo(jnp.float32).tiny)  # of nothing, all have enough

        def enough(kept: jax.Array) -> jax.Array:
            return jnp.where(kept, weights, 0.0).sum(-1, keepdims=True) >= wanted

        threshold = _highest_threshold(places, enough)
        return jnp.where(top_p[:, None, None] < 1.0, threshold, lowest)

    p_threshold = lax.cond(jnp.any(top_p < 1.0), top_p_threshold, lambda: lowest)
    return score_of(jnp.maximum(k_threshold, p_threshold))[..., 0]


def ordered(scores: jax.Array) -> jax.Array:
    """Maps f32 to i32 so that the order of the numbers is the order of the integers."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)  # -0.0, too
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def score_of(place: jax.Array) -> jax.Array:
    """The number of such an integer; -inf of all below its integer, which are no number's."""
    bits = jnp.where(place < 0, place ^ jnp.int32(0x7FFFFFFF), place)
    lowest = jnp.int32(-0x7F800001)  # of -inf
    return jnp.where(place <= lowest, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def _highest_threshold(places: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The highest t for which `enough(places >= t)` holds, i32[..., 1]; LOWEST where none does."""

    def try_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold + (jnp.int32(1) << (31 - i))  # the first wraps around to 0
        return jnp.where(enough(places >= candidate), candidate, threshold)

    start = jnp.full((*places.shape[:-1], 1), LOWEST, jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(32), try_bit, start)
