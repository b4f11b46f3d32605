"""`resolve_prepare`: `resolve_future` and `dflash_prepare_block` in one launch.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from kernels_pallas import dispatch
from kernels_pallas.dflash_prepare_block import PreparedBlock, check_block
from kernels_pallas.resolve_future import ResolvedFuture, check_relay
from kernels_pallas.resolve_prepare import reference, triton

__all__ = ["resolve_prepare"]

BACKENDS = {"triton": triton.refuses}


def resolve_prepare(
    output_tokens: jax.Array,
    seq_lens: jax.Array,
    carry: Any,
    rows: jax.Array,
    page_table: jax.Array,
    *,
    vocab_size: int,
    mask_token_id: int,
    block_size: int,
    page_size: int,
    poison: bool = False,
    implementation: str = "xla",
) -> tuple[ResolvedFuture, PreparedBlock]:
    """Reads a batch out of the relay and lays out its blocks, without a trip through memory.

    Equal to `resolve_future`, and `dflash_prepare_block` of its tokens and lens; `page_table` is
    i32[B, M], row b for `rows[b]`. The other arguments are theirs.

    Raises:
      ValueError: a shape, dtype or size is not as stated.
      UnsupportedKernel: the implementation is unknown.
    """
    check_relay(output_tokens, seq_lens, carry, rows, vocab_size)
    check_block(page_table, rows.shape[0], block_size, page_size)
    static = {
        "vocab_size": vocab_size,
        "mask_token_id": mask_token_id,
        "block_size": block_size,
        "page_size": page_size,
        "poison": poison,
    }
    match dispatch.parse("resolve_prepare", implementation):
        case "triton", interpret:
            run = functools.partial(triton.resolve_prepare, interpret=interpret)
        case _:
            run = reference.resolve_prepare
    return run(output_tokens, seq_lens, carry, rows, page_table, **static)
