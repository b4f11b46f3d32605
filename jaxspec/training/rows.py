"""Packs conversations into rows of one length and decides which rows a step reads. Host only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_OPEN_BINS = 64  # rows that may still be filled; more finds better fits and takes longer


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids, and which of them the target itself wrote and a drafter learns to guess."""

    token_ids: np.ndarray  # i32[n]
    supervised: np.ndarray  # bool[n]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Conversations side by side: R rows of S tokens. Segment 0 is padding.

    Example, S 6: conversations of 3 and 2 tokens give segments 1 1 1 2 2 0 and positions
    0 1 2 0 1 0.
    """

    token_ids: np.ndarray  # i32[R, S]
    segments: np.ndarray  # i32[R, S] 1.. in each row
    positions: np.ndarray  # i32[R, S] from 0 in each segment
    supervised: np.ndarray  # bool[R, S]

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, indices: np.ndarray) -> PackedRows:
        """The rows at some indices, in their order."""
        return PackedRows(
            self.token_ids[indices],
            self.segments[indices],
            self.positions[indices],
            self.supervised[indices],
        )


def pack_rows(
    conversations: Sequence[Conversation], row_len: int, *, seed: int, pad_id: int = 0
) -> PackedRows:
    """Fills rows with whole conversations, in an order drawn from the seed.

    A conversation longer than a row loses its end.

    Raises:
        ValueError: no conversation has two supervised tokens in a row within `row_len`.
    """
    usable = [c for c in conversations if _has_anchor(c.supervised[:row_len])]
    if not usable:
        raise ValueError(
            f"none of {len(conversations)} conversations has two tokens of a response within "
            f"{row_len} tokens; raise row_len or make other data"
        )
    order = np.random.default_rng(seed).permutation(len(usable))
    bins = _first_fit([min(len(usable[i].token_ids), row_len) for i in order], row_len)
    shape = (len(bins), row_len)
    rows = PackedRows(
        np.full(shape, pad_id, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
    )
    for row, members in enumerate(bins):
        start = 0
        for segment, member in enumerate(members, start=1):
            conversation = usable[order[member]]
            length = min(len(conversation.token_ids), row_len)
            here = slice(start, start + length)
            rows.token_ids[row, here] = conversation.token_ids[:length]
            rows.segments[row, here] = segment
            rows.positions[row, here] = np.arange(length)
            rows.supervised[row, here] = conversation.supervised[:length]
            start += length
    return rows


def _has_anchor(supervised: np.ndarray) -> bool:
    return bool((supervised[:-1] & supervised[1:]).any())


def _first_fit(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Puts each length into the first open row with room; the fullest rows close first."""
    closed: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (room, members)
    for index, length in enumerate(lengths):
        for at, (room, members) in enumerate(open_rows):
            if room >= length:
                members.append(index)
                open_rows[at] = (room - length, members)
                break
        else:
            open_rows.append((capacity - length, [index]))
        if len(open_rows) > _OPEN_BINS:
            fullest = min(range(len(open_rows)), key=lambda at: open_rows[at][0])
            closed.append(open_rows.pop(fullest)[1])
    return closed + [members for _, members in open_rows]


def batch_indices(step: int, batch_size: int, num_rows: int, *, seed: int) -> np.ndarray:
    """The rows of a step: epochs in orders drawn from the seed, laid end to end and cut evenly.

    Depends on nothing but its arguments, so that a resumed run reads what it would have read.

    Returns:
        i64[batch_size].
    """
    wanted = np.arange(step * batch_size, (step + 1) * batch_size)
    out = np.empty(batch_size, np.int64)
    for epoch in np.unique(wanted // num_rows):
        order = np.random.default_rng([seed, int(epoch)]).permutation(num_rows)
        here = wanted // num_rows == epoch
        out[here] = order[wanted[here] % num_rows]
    return out
