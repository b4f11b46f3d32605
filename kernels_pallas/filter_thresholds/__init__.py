"""`filter_thresholds`: which score a token needs to stay, by top-k and top-p, without sorting.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.filter_thresholds import reference, triton

__all__ = ["filter_thresholds"]

BACKENDS = {"triton": triton.refuses}


def filter_thresholds(
    scores: jax.Array, top_k: jax.Array, top_p: jax.Array, *, implementation: str = "xla"
) -> jax.Array:
    """Finds the lowest score that top-k and top-p keep; equal scores stay or go together.

    Top-k keeps the k highest scores. Of those, top-p keeps the fewest, from the highest on, whose
    share of the probability reaches p (nucleus sampling, arXiv 1904.09751): at least one.

    Args:
      scores: f32[B, N, V] unnormalised log-probabilities; -inf for what cannot be chosen.
      top_k: i32[B]; 0 or less keeps all, and so does more than V.
      top_p: f32[B]; 1 or more keeps all.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      f32[B, N]; -inf where nothing is filtered.
    """
    chex.assert_rank(scores, 3)
    chex.assert_shape((top_k, top_p), scores.shape[:1])
    chex.assert_type((scores, top_k, top_p), (jnp.float32, jnp.int32, jnp.float32))
    match dispatch.parse("filter_thresholds", implementation):
        case "triton", interpret:
            run = functools.partial(triton.filter_thresholds, interpret=interpret)
        case _:
            run = reference.filter_thresholds
    return run(scores, top_k, top_p)
