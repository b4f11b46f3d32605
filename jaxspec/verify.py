"""Which drafts stand: the accept rule of greedy and keyed sampling alike, and its clipping."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import DraftBlock
from kernels_pallas.accept import Accepted, accept


class Bounds(NamedTuple):
    """Where a request ends, one row a request.

    max_lens: i32[B] tokens of prompt and output at most. stop_ids: i32[B, E], padded with the
    vocabulary size. frozen: bool[B] ended before this step, commits nothing.
    """

    max_lens: jax.Array
    stop_ids: jax.Array
    frozen: jax.Array


def verify(
    draft: DraftBlock,
    predicted: jax.Array,
    seq_lens: jax.Array,
    bounds: Bounds,
    *,
    vocab_size: int,
    implementation: str = "xla",
    force_accept: int | None = None,
) -> Accepted:
    """Accepts the leading drafts that equal what the target chooses, and clips at the bounds.

    The target's own choice is emitted at every position, so the text never depends on the
    drafter: a draft only decides how many positions count ("sample and match", which for
    point-mass proposals is rejection sampling, arXiv 2302.01318).

    predicted: token_dtype[B, N] the target's choice after each position of the block.
    seq_lens: i32[B] position of the block's first token.
    force_accept: accepts this many drafts whatever the target says; not lossless.
    """
    column = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    # Beyond the meant drafts stands an id that no prediction equals.
    meant = column <= draft.num_draft_tokens[:, None]
    block_ids = jnp.where(meant, draft.tokens, jnp.asarray(vocab_size, draft.tokens.dtype))
    if force_accept is not None:
        predicted = _forced(draft.tokens, predicted, force_accept, vocab_size)
        block_ids = draft.tokens
    return accept(
        block_ids,
        predicted,
        seq_lens,
        bounds.max_lens,
        bounds.stop_ids,
        bounds.frozen,
        implementation=implementation,
    )


def _forced(tokens: jax.Array, predicted: jax.Array, count: int, vocab_size: int) -> jax.Array:
    """Predictions that agree with exactly the first `count` drafts."""
    next_drafts = jnp.roll(tokens, -1, axis=1)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    other = (predicted + 1) % vocab_size
    differing = jnp.where(predicted == next_drafts, other, predicted)
    return jnp.where(column < count, next_drafts, differing).astype(predicted.dtype)
