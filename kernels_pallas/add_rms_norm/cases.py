"""Named shapes of `add_rms_norm`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """Rows of the residual stream."""

    name: str
    num_rows: int
    width: int
    dtype: str = "float32"
    num_layers: int | None = None  # weights to choose from; None: one weight, no choice
    num_parts: int | None = None  # of what is added; None: it is whole


CASES = (
    Case("one row", 1, 256),
    Case("prime width", 3, 97),
    Case("bfloat16", 5, 576, "bfloat16"),
    Case("float16", 2, 64, "float16"),
    Case("third of four layers", 3, 160, num_layers=4),
    Case("three parts, bfloat16", 3, 160, "bfloat16", num_parts=3),
)

BENCH_CASES = tuple(
    Case(f"{num_rows} rows of {width}", num_rows, width, "bfloat16")
    for width in (576, 4096)
    for num_rows in (1, 16, 32, 512)
)


def make_inputs(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    shape = (case.num_rows, case.width)
    x, delta = (array(rng.standard_normal(shape), case.dtype) for _ in range(2))
    if case.num_parts is not None:
        delta = array(rng.standard_normal((case.num_parts, *shape)), np.float32)
    stack = () if case.num_layers is None else (case.num_layers,)
    weight = array(1 + 0.1 * rng.standard_normal((*stack, case.width)), case.dtype)
    layer = array([2], np.int32) if stack else None
    return (x, delta, weight, layer), {"eps": 1e-6}
