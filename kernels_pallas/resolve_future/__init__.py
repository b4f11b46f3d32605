"""`resolve_future`: reads a batch's rows of the relay, and checks them, in one launch.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from kernels_pallas import checks, dispatch
from kernels_pallas.resolve_future import reference, triton
from kernels_pallas.resolve_future.reference import (
    LEN_NOT_POSITIVE,
    TOKEN_OUT_OF_RANGE,
    ResolvedFuture,
)

__all__ = ["LEN_NOT_POSITIVE", "TOKEN_OUT_OF_RANGE", "ResolvedFuture", "resolve_future"]

BACKENDS = {"triton": triton.refuses}


def resolve_future(
    output_tokens: jax.Array,
    seq_lens: jax.Array,
    carry: Any,
    rows: jax.Array,
    *,
    vocab_size: int,
    poison: bool = False,
    implementation: str = "xla",
) -> ResolvedFuture:
    """Reads last token, length and carry of each row of a batch out of the relay.

    A token outside [0, vocab_size) is returned clamped into it and a length below 1 as 1, so that
    every later gather stays legal; the row's error bits say so. Row 0, the padding row, is exempt
    from the check. A row outside 0..S counts as row 0.

    Args:
      output_tokens: token_dtype[S+1] the relay's tokens.
      seq_lens: i32[S+1] rows of final KV of each slot.
      carry: the drafter's pytree, leaves [S+1, ...] of any dtype.
      rows: i32[B] the batch's rows; padding rows are 0, live rows are distinct.
      vocab_size: tokens are 0..vocab_size-1.
      poison: overwrite what was read, token by vocab_size and length by 0, so that a second read
        without a write between shows both error bits. Row 0 stays as it is. The relay arrays are
        updated in place when the caller donates them.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      The batch's values, and the relay arrays: poisoned, or the same ones.

    Raises:
      ValueError: a shape or dtype is not as stated.
      UnsupportedKernel: the implementation is unknown.
    """
    check_relay(output_tokens, seq_lens, carry, rows, vocab_size)
    static = {"vocab_size": vocab_size, "poison": poison}
    match dispatch.parse("resolve_future", implementation):
        case "triton", interpret:
            run = functools.partial(triton.resolve_future, interpret=interpret)
        case _:
            run = reference.resolve_future
    return run(output_tokens, seq_lens, carry, rows, **static)


def check_relay(output_tokens, seq_lens, carry, rows, vocab_size) -> None:
    """Raises ValueError unless the relay's arrays belong together."""
    checks.rank("seq_lens", seq_lens, "[S+1]")
    checks.rank("rows", rows, "[B]")
    checks.int32(seq_lens=seq_lens, rows=rows)
    checks.token(output_tokens=output_tokens)
    checks.shape("output_tokens", output_tokens, seq_lens.shape, "[S+1]")
    checks.at_least(1, vocab_size=vocab_size)
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        if leaf.shape[:1] != seq_lens.shape:
            raise ValueError(
                f"carry{jax.tree_util.keystr(path)} has shape {leaf.shape}, but its first axis "
                f"must be S+1 = {seq_lens.shape[0]}, one row a slot"
            )
