"""`dflash_prepare_block`: token ids, positions and KV places of a draft block, in one launch.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools

import jax

from kernels_pallas import checks, dispatch
from kernels_pallas.dflash_prepare_block import reference, triton
from kernels_pallas.dflash_prepare_block.reference import PreparedBlock

__all__ = ["MAX_BLOCK_SIZE", "PreparedBlock", "dflash_prepare_block"]

MAX_BLOCK_SIZE = 64

BACKENDS = {"triton": triton.refuses}


def dflash_prepare_block(
    bonus: jax.Array,
    lens: jax.Array,
    page_table: jax.Array,
    *,
    mask_token_id: int,
    block_size: int,
    page_size: int,
    implementation: str = "xla",
) -> PreparedBlock:
    """Lays out the block a DFlash drafter fills in: the bonus token, then N-1 mask tokens.

    Position i of row b stands at `lens[b] + i`; its KV goes to
    `page_table[b, position // page_size] * page_size + position % page_size`. A position past the
    table (or below 0) goes to page 0, which is nobody's. DFlash, arXiv 2602.06036, section 3.

    Args:
      bonus: token_dtype[B] first token of each block.
      lens: i32[B] its absolute position.
      page_table: i32[B, M] pages of each row; 0 where none is owned.
      mask_token_id: the drafter's mask token.
      block_size: N, 1..64; 1 is plain decoding.
      page_size: G, tokens a page.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      block_ids, positions, kv_locs, each [B, N].

    Raises:
      ValueError: a shape, dtype or size is not as stated.
      UnsupportedKernel: the implementation is unknown.
    """
    checks.rank("bonus", bonus, "[B]")
    checks.token(bonus=bonus)
    checks.shape("lens", lens, bonus.shape, "[B]")
    checks.int32(lens=lens)
    check_block(page_table, bonus.shape[0], block_size, page_size)
    static = {
        "mask_token_id": mask_token_id,
        "block_size": block_size,
        "page_size": page_size,
    }
    match dispatch.parse("dflash_prepare_block", implementation):
        case "triton", interpret:
            run = functools.partial(triton.dflash_prepare_block, interpret=interpret)
        case _:
            run = reference.dflash_prepare_block
    return run(bonus, lens, page_table, **static)


def check_block(page_table, batch, block_size, page_size) -> None:
    """Raises ValueError unless the page table and the sizes of a block are legal."""
    checks.rank("page_table", page_table, "[B, M]")
    checks.shape("page_table", page_table, (batch, page_table.shape[1]), "[B, M]")
    checks.int32(page_table=page_table)
    checks.at_least(1, page_size=page_size, num_pages=page_table.shape[1])
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"{block_size=} is outside 1..{MAX_BLOCK_SIZE}; take a drafter with smaller blocks"
        )
