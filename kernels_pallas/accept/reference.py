"""What `accept` means, in plain `jax.numpy`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PACKED_EXTRA = 4  # columns after the tokens: num_committed, num_accepted, finished, errors


class Accepted(NamedTuple):
    """What a verified block commits."""

    tokens: jax.Array  # token_dtype[B, N] committed tokens, then zeros
    num_accepted: jax.Array  # i32[B] drafts that matched, 0..K, before clipping
    num_committed: jax.Array  # i32[B] tokens appended, after stop ids and limits
    bonus: jax.Array  # token_dtype[B] the next block's first token
    new_lens: jax.Array  # i32[B] lens + num_committed: the position of the bonus
    finished: jax.Array  # bool[B]
    packed: jax.Array  # i32[B, N+4] tokens, num_committed, num_accepted, finished, 0


def accept(block_ids, predicted, lens, max_lens, stop_ids, frozen) -> Accepted:
    predicted = predicted.astype(block_ids.dtype)
    matches = predicted[:, :-1] == block_ids[:, 1:]
    num_accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return commit(predicted, num_accepted, block_ids[:, 0], lens, max_lens, stop_ids, frozen)


def commit(emitted, num_accepted, bonus, lens, max_lens, stop_ids, frozen) -> Accepted:
    """Clips emitted[:, :num_accepted + 1] at the first stop id and at the limit.

    Args:
      emitted: token_dtype[B, N] the target's tokens along the accepted path.
      num_accepted: i32[B] drafts on that path.
      bonus: token_dtype[B] the block's first token, already counted; kept if nothing is committed.
      lens, max_lens, stop_ids, frozen: as in `accept`.
    """
    block_size = emitted.shape[1]
    offsets = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    is_stop = (emitted[:, :, None] == stop_ids.astype(emitted.dtype)[:, None, :]).any(axis=2)
    first_stop = jnp.where(is_stop, offsets, block_size).min(axis=1)
    room = jnp.maximum(max_lens - (lens + 1), 0)
    committed = jnp.minimum(jnp.minimum(num_accepted, first_stop) + 1, room)
    committed = jnp.where(frozen, 0, committed)
    num_accepted = jnp.where(frozen, 0, num_accepted)
    finished = frozen | (first_stop < committed) | (lens + 1 + committed >= max_lens)
    tokens = jnp.where(offsets < committed[:, None], emitted, 0).astype(emitted.dtype)
    last = jnp.maximum(committed - 1, 0)[:, None]
    last_token = jnp.take_along_axis(emitted, last, axis=1)[:, 0]
    extra = jnp.stack(
        [committed, num_accepted, finished.astype(jnp.int32), jnp.zeros_like(committed)], axis=1
    )
    return Accepted(
        tokens=tokens,
        num_accepted=num_accepted,
        num_committed=committed,
        bonus=jnp.where(committed > 0, last_token, bonus),
        new_lens=lens + committed,
        finished=finished,
        packed=jnp.concatenate([tokens.astype(jnp.int32), extra], axis=1),
    )
