"""What `resolve_future` means, in plain `jax.numpy`; the path of CPUs and of GPUs below sm_80."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LEN_NOT_POSITIVE = 1
TOKEN_OUT_OF_RANGE = 2


class ResolvedFuture(NamedTuple):
    """What a batch reads of the relay."""

    tokens: jax.Array  # token_dtype[B] last token, clamped into [0, vocab_size)
    lens: jax.Array  # i32[B] rows of KV = position of the token, at least 1
    carry: Any  # the drafter's pytree, leaves [B, ...]
    errors: jax.Array  # i32[B] LEN_NOT_POSITIVE | TOKEN_OUT_OF_RANGE
    output_tokens: jax.Array  # token_dtype[S+1] the relay, poisoned where asked
    seq_lens: jax.Array  # i32[S+1] likewise


def resolve_future(
    output_tokens, seq_lens, carry, rows, *, vocab_size, poison=False
) -> ResolvedFuture:
    num_rows = seq_lens.shape[0]
    rows = jnp.where((rows >= 0) & (rows < num_rows), rows, 0)
    tokens, lens = output_tokens[rows], seq_lens[rows]
    bad_len = lens <= 0
    bad_token = (tokens < 0) | (tokens >= vocab_size)
    errors = jnp.where(bad_len, LEN_NOT_POSITIVE, 0) | jnp.where(bad_token, TOKEN_OUT_OF_RANGE, 0)
    errors = jnp.where(rows == 0, 0, errors).astype(jnp.int32)
    if poison:
        # Row 0 is written back as it is: padded rows all write it, and with the same value.
        poisoned = jnp.where(rows == 0, tokens, vocab_size)
        output_tokens = output_tokens.at[rows].set(poisoned.astype(output_tokens.dtype))
        seq_lens = seq_lens.at[rows].set(jnp.where(rows == 0, lens, 0))
    return ResolvedFuture(
        tokens=jnp.clip(tokens, 0, vocab_size - 1),
        lens=jnp.maximum(lens, 1),
        carry=jax.tree.map(lambda leaf: leaf[rows], carry),
        errors=errors,
        output_tokens=output_tokens,
        seq_lens=seq_lens,
    )
