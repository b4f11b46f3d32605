"""Log-probabilities of chosen tokens, and the likeliest tokens beside them, as one i32 array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import MAX_LOGPROBS

_CHUNK = 128


def logprob_width(vocab_size: int) -> int:
    """Columns of `pack_logprobs`."""
    return 2 + 2 * min(MAX_LOGPROBS, vocab_size)


def pack_logprobs(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """What an API tells of each position, by bit pattern where it is a float.

    logits: f32[B, N, V] of the model, before temperature, filters and edits. chosen: [B, N].
    Returns i32[B, N, 2 + 2K], K the smaller of MAX_LOGPROBS and V: log-probability and rank of the
    chosen token, the ids of the K likeliest in falling order, and their log-probabilities.
    """
    chosen = chosen.astype(jnp.int32)[..., None]
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    value = jnp.take_along_axis(logits, chosen, axis=-1)
    rank = 1 + (logits > value).sum(-1, keepdims=True, dtype=jnp.int32)
    top, ids = top_tokens(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    floats = [lax.bitcast_convert_type(each - normaliser, jnp.int32) for each in (value, top)]
    return jnp.concatenate([floats[0], rank, ids, floats[1]], axis=-1)


def top_tokens(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` highest logits and their ids, of equals the lower id first, without a long sort.

    The highest tokens lie in the chunks whose own highest tokens are the highest: one pass over the
    vocabulary finds these, and only what they hold is sorted.

    logits: f32[B, N, V]. Returns (f32[B, N, count], i32[B, N, count]).
    """
    batch, positions, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    if num_chunks <= count:
        top, ids = lax.top_k(logits, count)
        return top, ids.astype(jnp.int32)
    padding = num_chunks * _CHUNK - vocab_size
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
    chunks = padded.reshape(batch, positions, num_chunks, _CHUNK)
    _, best = lax.top_k(chunks.max(-1), count)
    best = jnp.sort(best.astype(jnp.int32), axis=-1)
    held = jnp.take_along_axis(chunks, best[..., None], axis=2)
    top, places = lax.top_k(held.reshape(batch, positions, count * _CHUNK), count)
    places = places.astype(jnp.int32)
    chunk = jnp.take_along_axis(best, places // _CHUNK, axis=-1)
    return top, chunk * _CHUNK + places % _CHUNK
