"""`filter_thresholds` as one Pallas-Triton launch, which costs rows that filter nothing no pass.

As XLA runs the reference, the host waits twice a step for whether some row filters, and a
filtering batch launches 32 loop bodies. Here a program finds out for its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.filter_thresholds.reference import LOWEST, ordered, score_of

_CHUNK = 8192  # scores that a program holds at once
_NUM_WARPS = 32
# Two bits of the threshold a pass: three candidates are counted in the time that one takes to read.
_PASSES = 16


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def filter_thresholds(
    scores: jax.Array, top_k: jax.Array, top_p: jax.Array, *, interpret: bool
) -> jax.Array:
    """See `filter_thresholds`. Grid: (B, N); a program searches one row of scores."""
    batch, block_size, _ = scores.shape
    return pl.pallas_call(
        _kernel,
        name="filter_thresholds",
        grid=(batch, block_size),
        out_shape=jax.ShapeDtypeStruct((batch, block_size), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
    )(scores, top_k, top_p)


def _kernel(scores_ref, top_k_ref, top_p_ref, threshold_ref):
    b, n = pl.program_id(0), pl.program_id(1)
    top_k = pltriton.load(top_k_ref.at[b])
    top_p = pltriton.load(top_p_ref.at[b])
    vocab_size = scores_ref.shape[2]
    lane = jnp.arange(min(_CHUNK, pl.next_power_of_2(vocab_size)), dtype=jnp.int32)
    num_chunks = pl.cdiv(vocab_size, lane.size)

    def times(count: int, when: jax.Array) -> jax.Array:
        # Two literals in one select would become bits in Triton's code, whatever their type.
        return jnp.where(when, jnp.int32(count), jnp.zeros_like(top_k))

    def fold(step: Callable[[jax.Array, Any], Any], start: Any, *, when: jax.Array) -> Any:
        """Folds over the row's scores, a chunk at a time; beyond the row they are NaN."""

        def body(chunk: jax.Array, carry: Any) -> Any:
            at = chunk * lane.size + lane
            scores = pltriton.load(scores_ref.at[b, n, at], mask=at < vocab_size, other=jnp.nan)
            return step(scores, carry)

        return lax.fori_loop(jnp.int32(0), times(num_chunks, when), body, start)

    def search(
        weigh: Callable[[jax.Array], jax.Array], wanted: jax.Array, *, when: jax.Array
    ) -> jax.Array:
        """The highest score from which on the weights add up to `wanted`; else -inf."""
        nothing = jnp.zeros(lane.shape, wanted.dtype)

        def narrow(i: jax.Array, threshold: jax.Array) -> jax.Array:
            step = jnp.int32(1) << (2 * (_PASSES - 1 - i))
            candidates = [threshold + step, threshold + 2 * step, threshold + 3 * step]

            def add(scores: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                places, weights = ordered(scores), weigh(scores)
                return tuple(
                    total + jnp.where((places >= candidate) & (scores == scores), weights, 0)
                    for total, candidate in zip(sums, candidates, strict=True)
                )

            sums = fold(add, (nothing,) * 3, when=when)
            for total, candidate in zip(sums, candidates, strict=True):
                enough = jnp.sum(total, dtype=wanted.dtype) >= wanted
                threshold = jnp.where(enough, candidate, threshold)
            return threshold

        found = lax.fori_loop(jnp.int32(0), times(_PASSES, when), narrow, jnp.int32(LOWEST))
        return score_of(found)

    def one(scores: jax.Array) -> jax.Array:
        return jnp.ones_like(scores, jnp.int32)

    k_threshold = search(one, top_k, when=top_k > 0)

    filters = top_p < 1.0
    lowest = jnp.full(lane.shape, -jnp.inf, jnp.float32)
    highest = jnp.max(
        fold(lambda scores, most: jnp.where(scores > most, scores, most), lowest, when=filters)
    )

    def weigh(scores: jax.Array) -> jax.Array:
        return jnp.where(scores >= k_threshold, jnp.exp(scores - highest), 0.0)

    nothing = jnp.zeros(lane.shape, jnp.float32)
    total = jnp.sum(fold(lambda scores, total: total + weigh(scores), nothing, when=filters))
    wanted = jnp.maximum(total * top_p, jnp.finfo(jnp.float32).tiny)  # of nothing, all have enough
    p_threshold = search(weigh, wanted, when=filters)
    pltriton.store(threshold_ref.at[b, n], jnp.maximum(k_threshold, p_threshold))
