"""The host's plan of one decode dispatch. Host only: moves row ids, never device arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DraftInput:
    """Rows that decode together, and the KV rows reserved for each.

    Every decode dispatch is built from one, overlapped or not.

    rows: i32[n] slots, without padding and without repetition.
    reserved_lens: i32[n] KV rows that the row's pages hold.
    """

    rows: np.ndarray
    reserved_lens: np.ndarray

    def __post_init__(self) -> None:
        if self.rows.shape != self.reserved_lens.shape or self.rows.ndim != 1:
            raise ValueError(
                f"rows {self.rows.shape} and reserved lengths {self.reserved_lens.shape} must be "
                "vectors of one length"
            )
        if (self.rows < 1).any() or len(set(self.rows.tolist())) != len(self.rows):
            raise ValueError(f"rows {self.rows.tolist()} must be distinct slots from 1 on")

    @classmethod
    def create(cls, rows: list[int], reserved_lens: list[int]) -> DraftInput:
        """Builds the plan from Python lists."""
        return cls(np.asarray(rows, np.int32), np.asarray(reserved_lens, np.int32))

    @classmethod
    def create_idle_input(cls) -> DraftInput:
        """The plan of a batch without requests."""
        return cls.create([], [])

    def filter_batch(self, keep_rows: set[int]) -> DraftInput:
        """Keeps the rows in `keep_rows`, in their order."""
        keep = np.array([row in keep_rows for row in self.rows.tolist()], bool)
        return DraftInput(self.rows[keep], self.reserved_lens[keep])

    def merge_batch(self, other: DraftInput) -> DraftInput:
        """Appends the rows of another plan; no row may be in both."""
        return DraftInput(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.reserved_lens, other.reserved_lens]),
        )

    def reserve(self, lens: np.ndarray) -> DraftInput:
        """Raises the reserved lengths to `lens` i32[n], never lowers them."""
        return DraftInput(self.rows, np.maximum(self.reserved_lens, lens))

    def __len__(self) -> int:
        return len(self.rows)
