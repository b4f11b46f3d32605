"""What grammars allow at each position of a batch. Host only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxspec.engine.sequence import Sequence
from jaxspec.grammar import ALL


def allowed_tokens(
    entries: Iterable[tuple[Sequence, int | None]],
    tokens: np.ndarray,
    parents: np.ndarray | None,
    vocab_size: int,
) -> np.ndarray:
    """Bits of the tokens that may follow: u32[B, N, ceil(V / 32)], all where nothing restricts.

    entries: requests and their rows of the batch. tokens: i32[B, N] of the blocks, token 0 the last
    of each text. parents: i32[B, N] of trees; None for chains.
    """
    allowed = np.full((*tokens.shape, -(-vocab_size // 32)), ALL)
    for seq, row in entries:
        if seq.matcher is not None and row is not None and not seq.is_over:
            of_row = None if parents is None else parents[row].tolist()
            seq.matcher.fill(allowed[row], tokens[row].tolist(), of_row)
    return allowed
