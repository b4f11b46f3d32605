"""From logits to tokens: filters without sorting, and noise keyed by (seed, absolute position).

The token at a position depends on its logits, its request's parameters and its key alone, hence
it is the same in plain decoding and in verification, in any batch and after any preemption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.future_map import token_dtype
from kernels_pallas.filter_thresholds import filter_thresholds

_THREEFRY = "threefry2x32"
_CHUNK = 128


@flax.struct.dataclass
class SamplingRows:
    """Sampling parameters, one row a request: leaves [B] (or [S+1] in the engine's state).

    temperature: f32, 0 means greedy. top_k: i32, 0 means off. top_p: f32, 1 means off.
    min_p: f32, 0 means off. key: u32[., 2] threefry key of the request.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingRows:
        """Rows that take the highest logit."""
        return cls(
            temperature=jnp.zeros((num_rows,), jnp.float32),
            top_k=jnp.zeros((num_rows,), jnp.int32),
            top_p=jnp.ones((num_rows,), jnp.float32),
            min_p=jnp.zeros((num_rows,), jnp.float32),
            key=jnp.zeros((num_rows, 2), jnp.uint32),
        )


def greedy_tokens(logits: jax.Array) -> jax.Array:
    """Takes the first highest logit: f32[..., V] -> token_dtype[...]."""
    highest = _first_highest
    if logits.shape[-1] % _CHUNK == 0 and logits.shape[-1] > _CHUNK:
        highest = functools.partial(
            lax.platform_dependent, cpu=_first_highest_by_chunks, default=_first_highest
        )
    return highest(logits).astype(token_dtype())


def _first_highest(values: jax.Array) -> jax.Array:
    return lax.argmax(values, values.ndim - 1, jnp.int32)


def _first_highest_by_chunks(values: jax.Array) -> jax.Array:
    """As `_first_highest`: on CPUs, XLA's maximum runs in vectors, its argmax does not."""
    chunks = values.reshape(*values.shape[:-1], -1, _CHUNK)
    first = _first_highest(chunks.max(-1))
    held = jnp.take_along_axis(chunks, first[..., None, None], axis=-2)[..., 0, :]
    return first * _CHUNK + _first_highest(held)


def sample_tokens(logits: jax.Array, positions: jax.Array, rows: SamplingRows) -> jax.Array:
    """Chooses the token of each position: the highest of `sampling_scores`.

    logits: f32[B, N, V]. positions: i32[B, N] absolute positions of the tokens to choose.
    Returns token_dtype[B, N].
    """
    return greedy_tokens(sampling_scores(logits, positions, rows))


def sampling_scores(
    logits: jax.Array, positions: jax.Array, rows: SamplingRows, *, implementation: str = "xla"
) -> jax.Array:
    """What each position's token is the highest of, rows of different settings side by side.

    Order: temperature, top-k, top-p over what top-k kept, min-p; then the Gumbel maximum with
    noise from `fold_in(key, position)`. Greedy rows keep their logits. f32[B, N, V]; what is
    filtered out has -inf.
    """
    greedy = rows.temperature == 0.0
    noise = position_gumbel(rows.key, positions, logits.shape[-1])
    noisy = filtered_scores(logits, rows, implementation=implementation) + noise
    return jnp.where(greedy[:, None, None], logits, noisy)


def filtered_scores(
    logits: jax.Array, rows: SamplingRows, *, implementation: str = "xla"
) -> jax.Array:
    """Unnormalised log-probabilities that tokens are drawn with: f32[B, N, V], -inf for none.

    Greedy rows are treated as those of temperature 1.
    """
    temperature = jnp.where(rows.temperature == 0.0, 1.0, rows.temperature).astype(jnp.float32)
    # Measured from the highest, so that no temperature, however small, makes them overflow.
    scores = (logits - logits.max(-1, keepdims=True)) / temperature[:, None, None]
    return jnp.where(filter_mask(scores, rows, implementation=implementation), scores, -jnp.inf)


def position_gumbel(keys: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise f32[B, N, V] of keys u32[B, 2] at absolute positions i32[B, N]."""

    def of_key(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return fold_positions(keys, positions, of_key)


def fold_positions(
    keys: jax.Array, positions: jax.Array, of_key: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Draws with `fold_in(key, position)` of keys u32[B, 2], positions i32[B, N]: [B, N, ...]."""

    def of_position(key_data: jax.Array, position: jax.Array) -> jax.Array:
        return of_key(
            jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=_THREEFRY), position)
        )

    return jax.vmap(jax.vmap(of_position, (None, 0)), (0, 0))(keys, positions)


def filter_mask(scores: jax.Array, rows: SamplingRows, *, implementation: str = "xla") -> jax.Array:
    """True where top-k, top-p and min-p keep a token: scores f32[B, N, V] -> bool[B, N, V].

    Each filter keeps the tokens whose score reaches a threshold, and equal scores together.
    implementation: of `filter_thresholds`.
    """
    threshold = filter_thresholds(scores, rows.top_k, rows.top_p, implementation=implementation)
    # p >= min_p * p_max, whatever the normalisation; log(0) = -inf keeps all.
    least = scores.max(-1) + jnp.log(rows.min_p)[:, None]
    return scores >= jnp.maximum(threshold, least)[..., None]
