"""Which drafts stand: the accept rule of greedy and keyed sampling alike, and its clipping.

A chain and a tree of drafts are judged alike: the target's own choice is emitted, and the drafts
only decide how many of its choices count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import Kernels
from jaxspec.drafters.base import DraftBlock
from jaxspec.drafters.tree import ancestors, depths
from kernels_pallas.accept import Accepted, accept
from kernels_pallas.accept_tree import accept_tree


class Bounds(NamedTuple):
    """Where a request ends, one row a request.

    max_lens: i32[B] tokens of prompt and output at most. stop_ids: i32[B, E], padded with the
    vocabulary size. frozen: bool[B] ended before this step, commits nothing.
    """

    max_lens: jax.Array
    stop_ids: jax.Array
    frozen: jax.Array


class Verdict(NamedTuple):
    """What is committed, and where in the block it stands.

    path: i32[B, N] of a tree: the node that each committed token was chosen behind; None: a chain,
    whose tokens were chosen in order.
    """

    accepted: Accepted
    path: jax.Array | None


def verify(
    draft: DraftBlock,
    predicted: jax.Array,
    seq_lens: jax.Array,
    bounds: Bounds,
    *,
    vocab_size: int,
    kernels: Kernels,
    force_accept: int | None = None,
) -> Verdict:
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
    clip_at = (seq_lens, bounds.max_lens, bounds.stop_ids, bounds.frozen)
    if draft.parents is None:
        if force_accept is not None:
            predicted = _forced(draft.tokens, predicted, force_accept, vocab_size)
            block_ids = draft.tokens
        accepted = accept(block_ids, predicted, *clip_at, implementation=kernels.accept)
        return Verdict(accepted, None)
    parents = draft.parents
    if force_accept is not None:
        predicted, parents = _forced_path(draft, predicted, force_accept)
        block_ids = draft.tokens
    return Verdict(
        *accept_tree(block_ids, parents, predicted, *clip_at, implementation=kernels.accept_tree)
    )


def _forced(tokens: jax.Array, predicted: jax.Array, count: int, vocab_size: int) -> jax.Array:
    """Predictions that agree with exactly the first `count` drafts."""
    next_drafts = jnp.roll(tokens, -1, axis=1)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    other = (predicted + 1) % vocab_size
    differing = jnp.where(predicted == next_drafts, other, predicted)
    return jnp.where(column < count, next_drafts, differing).astype(predicted.dtype)


def _forced_path(
    draft: DraftBlock, predicted: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Predictions along the first path of `count` drafts, of a tree that ends there.

    A tree without a path so long is followed to its first deepest node.
    """
    reach = ancestors(draft.parents)
    depth = depths(reach)
    node = jnp.arange(depth.shape[1], dtype=jnp.int32)[None, :]
    parents = jnp.where(depth > count, -1, draft.parents)
    end = lax.argmax(jnp.where(parents >= 0, depth, 0), 1, jnp.int32)[:, None, None]
    on_path = jnp.take_along_axis(reach, end, axis=1)[:, 0] & (node > 0)
    behind = jnp.where(on_path, parents, depth.shape[1])  # past the end: dropped
    rows = jnp.arange(len(depth))[:, None]
    return predicted.at[rows, behind].set(draft.tokens, mode="drop"), parents
