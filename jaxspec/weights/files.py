"""What a weight file is to everything else: named tensors, each read a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Progress = Callable[[str, int, int], None]
"""(what is being done, units done, units in all; 0 in all: unknown)."""

CHUNK_ELEMENTS = 1 << 17  # decoded at a time: stays in the cache, 4x faster than whole tensors


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class ModelFileError(ValueError):
    """A model's files cannot be used; says the file, what is wrong with it, and the remedy."""

    def __init__(self, file: Path | str, what: str, remedy: str) -> None:
        super().__init__(f"{file}: {what}; {remedy}.")
        self.file, self.what = file, what


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: where its bytes are and how they become numbers."""

    name: str
    shape: tuple[int, ...]  # row-major, as numpy has it
    dtype: str  # the file format's own word: "BF16", "Q4_1"
    file: Path
    offset: int
    num_bytes: int
    value_dtype: np.dtype  # what `decode` gives
    decode: Callable[[np.ndarray], np.ndarray]  # u8[whole blocks] -> 1-D numbers

    def read_into(self, out: np.ndarray) -> None:
        """Fills `out` with the tensor's values, converted to its dtype.

        Args:
            out: C-contiguous array of as many elements as the tensor has.

        Raises:
            ModelFileError: the file ends early, or a value does not fit into float16.
        """
        flat = out.reshape(-1)
        position = 0
        for values in self.chunks():
            self._store(values, flat[position : position + values.size])
            position += values.size

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields the values in order, some rows at a time, 1-D.

        Raises:
            ModelFileError: the file ends early.
        """
        # A chunk is a whole number of rows, hence of quantisation blocks.
        rows = self.shape[0] if len(self.shape) > 1 else 1
        row_bytes = self.num_bytes // rows
        step = max(1, CHUNK_ELEMENTS * rows // math.prod(self.shape))
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            for row in range(0, rows, step):
                wanted = (min(row + step, rows) - row) * row_bytes
                raw = file.read(wanted)
                if len(raw) != wanted:
                    raise ModelFileError(
                        self.file,
                        f"the file ends inside tensor {self.name}",
                        "it was cut short since it was opened, fetch it again",
                    )
                yield self.decode(np.frombuffer(raw, np.uint8))

    def _store(self, values: np.ndarray, out: np.ndarray) -> None:
        if out.dtype != np.float16 or values.dtype == np.float16:
            out[:] = values
            return
        with np.errstate(over="ignore"):
            out[:] = values
        if not np.isfinite(out).all():
            raise ModelFileError(
                self.file,
                f"tensor {self.name} holds {np.abs(values).max()}, float16 ends at 65504",
                "choose dtype bfloat16 or float32",
            )

    def read(self) -> np.ndarray:
        """The whole tensor, in the type that it is stored in (float32 where quantised)."""
        out = np.empty(self.shape, self.value_dtype)
        self.read_into(out)
        return out
