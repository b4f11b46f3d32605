"""A batch of requests, and a step of it on its way to the device and back."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.config import Geometry
from jaxspec.engine.admission import Tile, bucket
from jaxspec.engine.draft_input import DraftInput
from jaxspec.engine.sequence import Sequence as Seq
from jaxspec.engine.state import empty_decode_batch
from jaxspec.mode import Mode


class Entry(NamedTuple):
    """A request in a dispatch, and its row of the output; None where the row says nothing yet."""

    seq: Seq
    row: int | None


class Dispatch(NamedTuple):
    """A step on its way."""

    output: jax.Array  # packed, i32[B, N+4], or i32[k, B, N+4] of a loop
    entries: Sequence[Entry]
    slots: np.ndarray  # i32[n] of the entries
    max_commit: int  # rows of KV that it can add to a request
    kind: str  # "prefill" | "decode" | "decode_loop"
    mode: Mode
    size: int  # bucket
    width: int  # tokens verified a row
    started_s: float
    tiles: Collection[Tile]  # of a prefill

    @property
    def is_prefill(self) -> bool:
        """True of a prefill."""
        return self.kind == "prefill"

    @property
    def batch(self) -> Hashable:
        """What tells programs of one width apart: kind, mode and bucket."""
        return self.kind, self.mode, self.size


class DecodeBatch:
    """Requests that decode together, from one dispatch to the next while they stay the same ones.

    What does not change between dispatches is worked out once.

    plan: their slots, and the KV rows that their pages hold. mode: the highest among them.
    needs_host: one of them does, see `Sequence.needs_host`.
    """

    def __init__(self, plan: DraftInput, seqs: list[Seq], geometry: Geometry):
        pages = np.array([len(seq.pages) for seq in seqs], np.int32)
        self.plan = plan.reserve(pages * np.int32(geometry.page_size))
        self.seqs = seqs
        self.entries = [Entry(seq, row) for row, seq in enumerate(seqs)]
        self.mode = max(seq.request.params.mode for seq in seqs)
        self.needs_host = any(seq.needs_host for seq in seqs)
        self._geometry = geometry
        self._packed: jax.Array | None = None

    def short_of(self, needed_lens: np.ndarray) -> list[int]:
        """Places of the requests whose pages do not hold their entry of `needed_lens` i32[n]."""
        short = needed_lens > self.plan.reserved_lens
        return np.flatnonzero(short).tolist() if short.any() else []

    def reserve(self, needed_lens: np.ndarray) -> None:
        """Notes that all requests have the pages for `needed_lens` now."""
        size = np.int32(self._geometry.page_size)
        self.plan = self.plan.reserve(-(-needed_lens // size) * size)
        self._packed = None

    def packed(self, page_table: np.ndarray) -> jax.Array:
        """`pack_decode` of the plan, on the device while no request gets another page.

        A step reads it in every layer: at a new address, XLA would set the parameters of all those
        launches in its command buffer anew.
        """
        if self._packed is None:
            self._packed = jax.device_put(pack_decode(self.plan, self._geometry, page_table))
        return self._packed


def pack_decode(plan: DraftInput, geometry: Geometry, page_table: np.ndarray) -> np.ndarray:
    """The packed array of a decode dispatch, i32[B, 1 + M], padded to its bucket with row 0.

    A new array each time: the device may still read the last one (jax#37830).
    """
    size = bucket(len(plan), geometry.batch_buckets)
    packed = empty_decode_batch(size, geometry)
    packed[: len(plan), 0] = plan.rows
    packed[: len(plan), 1:] = page_table[plan.rows]
    return packed
