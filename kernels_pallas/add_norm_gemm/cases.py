"""Named shapes of `add_norm_gemm`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """Rows of the residual stream, and what multiplies them: with swiglu twice as tall."""

    name: str
    num_rows: int
    outputs: int
    width: int
    swiglu: bool = False
    dtype: str = "float32"
    num_layers: int | None = None  # norms to choose from; None: one norm, no choice


CASES = (
    Case("one row, swiglu, bfloat16", 1, 52, 576, swiglu=True, dtype="bfloat16"),
    Case("prime sizes", 3, 67, 131),
    Case("8 rows, third of four layers", 8, 96, 160, num_layers=4),
    Case("16 rows, swiglu, float16", 16, 40, 576, swiglu=True, dtype="float16"),
)

# SmolLM2-135M's.
BENCH_CASES = tuple(
    Case(f"{name}, {num_rows} rows", num_rows, outputs, 576, swiglu, "bfloat16")
    for num_rows in (1, 8, 16)
    for name, outputs, swiglu in (("qkv", 960, False), ("gate_up + swiglu", 1536, True))
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    rows = case.outputs * (2 if case.swiglu else 1)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return array(mean + scale * rng.standard_normal(shape, np.float32), case.dtype)

    stack = () if case.num_layers is None else (case.num_layers,)
    args = (
        normal(case.num_rows, case.width),
        normal(case.num_rows, case.width),
        normal(*stack, case.width, scale=0.1, mean=1.0),
        normal(rows, case.width, scale=case.width**-0.5),
        array([2], np.int32) if stack else None,
    )
    return args, {"eps": 1e-6, "swiglu": case.swiglu}
