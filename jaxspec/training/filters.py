"""What is no good to learn from or to measure on: loops, copies, and what both sets share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

LOOP_NGRAM = 8
LOOP_RUN = 24  # so many tokens on end, each ending an n-gram that came before: a loop
SHARED_NGRAM = 13  # tokens in a row that two texts hardly share by chance (GPT-3's overlap test)
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Where a text begins to repeat itself; None where it never does.

    Small models get stuck under greedy decoding, and what they say then is easy to guess: it
    would make any drafter look good. A repeated phrase is no loop, only a run of `LOOP_RUN`
    tokens that were all there before, in the same order.

    Returns:
        Index of the first token that repeats.
    """
    grams = ngram_hashes(token_ids, LOOP_NGRAM)
    _, first = np.unique(grams, return_index=True)
    repeated = np.ones(len(grams), bool)
    repeated[first] = False
    before = np.concatenate([[0], np.cumsum(repeated)])
    runs = np.nonzero(before[LOOP_RUN:] - before[:-LOOP_RUN] == LOOP_RUN)[0]
    return int(runs[0]) if len(runs) else None


def ngram_hashes(token_ids: Sequence[int], n: int) -> np.ndarray:
    """u64[max(0, len - n + 1)]: a hash of each run of n tokens."""
    ids = np.asarray(token_ids, np.uint64) + np.uint64(1)
    count = max(0, len(ids) - n + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = hashes * _PRIME + ids[offset : offset + count]
    return hashes ^ (hashes >> np.uint64(29))


def text_key(text: str) -> str:
    """The same for texts that differ only in case, spaces and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


class SharedText:
    """Finds texts that a held-out set holds as well: a common 13-gram, or the whole of a short one.

    held_out: (text, its token ids) of each.
    """

    def __init__(self, held_out: Iterable[tuple[str, Sequence[int]]]):
        pairs = list(held_out)
        self._keys = {text_key(text) for text, _ in pairs}
        hashes = [ngram_hashes(ids, SHARED_NGRAM) for _, ids in pairs]
        self._hashes = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))

    def holds(self, text: str, token_ids: Sequence[int]) -> bool:
        """Whether a text is in the set, or shares 13 tokens in a row with it."""
        return text_key(text) in self._keys or self.holds_run(token_ids)

    def holds_run(self, token_ids: Sequence[int]) -> bool:
        """Whether tokens share 13 in a row with a text of the set."""
        hashes = ngram_hashes(token_ids, SHARED_NGRAM)
        nearest = self._hashes.searchsorted(hashes).clip(max=max(len(self._hashes) - 1, 0))
        return bool(len(self._hashes)) and bool((self._hashes[nearest] == hashes).any())
