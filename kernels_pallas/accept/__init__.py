"""`accept`: from the target's predicted ids to what a step commits and reports, in one launch.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools

import jax

from kernels_pallas import checks, dispatch
from kernels_pallas.accept import reference, triton
from kernels_pallas.accept.reference import PACKED_EXTRA, Accepted

__all__ = ["PACKED_EXTRA", "Accepted", "accept"]

BACKENDS = {"triton": triton.refuses}


def accept(
    block_ids: jax.Array,
    predicted: jax.Array,
    lens: jax.Array,
    max_lens: jax.Array,
    stop_ids: jax.Array,
    frozen: jax.Array,
    *,
    implementation: str = "xla",
) -> Accepted:
    """Accepts the leading drafts that the target predicts too, and adds its own next token.

    With a the number of leading i where `predicted[i] == block_ids[i + 1]`, the emitted tokens are
    `predicted[:a + 1]`. They are committed up to and with the first stop id, and while they fit
    `max_lens`; the bonus token `block_ids[0]` at position `lens` is counted already, hence
    `max_lens - (lens + 1)` more fit. A row that is full commits nothing and is finished. A frozen
    row commits nothing, keeps its bonus and stays finished.

    Args:
      block_ids: token_dtype[B, N] bonus token, then drafts.
      predicted: int[B, N] the target's token after each position of the block.
      lens: i32[B] position of the bonus token.
      max_lens: i32[B] tokens of prompt and output allowed.
      stop_ids: int[B, E] ids that end a row; fill up with an id outside the vocabulary.
      frozen: bool[B] rows that have finished already, padding rows among them.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Raises:
      ValueError: a shape or dtype is not as stated.
      UnsupportedKernel: the implementation is unknown.
    """
    check_verified(block_ids, predicted, lens, max_lens, stop_ids, frozen)
    match dispatch.parse("accept", implementation):
        case "triton", interpret:
            run = functools.partial(triton.accept, interpret=interpret)
        case _:
            run = reference.accept
    return run(block_ids, predicted, lens, max_lens, stop_ids, frozen)


def check_verified(block_ids, predicted, lens, max_lens, stop_ids, frozen) -> None:
    """Raises ValueError unless the arrays of a verified block belong together."""
    checks.rank("block_ids", block_ids, "[B, N]")
    batch, _ = block_ids.shape
    checks.token(block_ids=block_ids, predicted=predicted, stop_ids=stop_ids)
    checks.int32(lens=lens, max_lens=max_lens)
    checks.shape("predicted", predicted, block_ids.shape, "[B, N]")
    checks.shape("lens", lens, (batch,), "[B]")
    checks.shape("max_lens", max_lens, (batch,), "[B]")
    checks.shape("frozen", frozen, (batch,), "[B]")
    checks.rank("stop_ids", stop_ids, "[B, E]")
    checks.shape("stop_ids", stop_ids, (batch, stop_ids.shape[1]), "[B, E]")
    checks.at_least(1, num_stop_ids=stop_ids.shape[1])
    if frozen.dtype != bool:
        raise ValueError(f"frozen is {frozen.dtype}, but must be bool; cast it")
