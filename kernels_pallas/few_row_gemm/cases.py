"""Named shapes of `few_row_gemm`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from kernels_pallas.few_row_gemm import many_rows
from kernels_pallas.testing import array


class Case(NamedTuple):
    """A product [num_rows, width] x [outputs, width]^T; with swiglu the weight is twice as tall."""

    name: str
    num_rows: int
    outputs: int
    width: int
    residual: bool = False
    swiglu: bool = False
    dtype: str = "float32"
    num_parts: int = 1


CASES = (
    Case("one row", 1, 128, 256),
    Case("residual, prime sizes", 17, 67, 131, residual=True),
    Case("swiglu, bfloat16", 16, 96, 512, swiglu=True, dtype="bfloat16"),
    Case("swiglu and residual, 64 rows", 64, 48, 192, residual=True, swiglu=True),
    Case("wide, float16", 33, 128, 320, residual=True, dtype="float16"),
    Case("tall, bfloat16", 5, 200, 96, dtype="bfloat16"),
    Case("three parts", 3, 72, 192, num_parts=3),
    # One for each way that `triton.choose` goes for a large weight.
    Case("large, bfloat16", 3, 2561, 80, dtype="bfloat16"),
    Case("large and wide, bfloat16", 2, 2560, 5184, residual=True, dtype="bfloat16"),
    Case("large, swiglu, bfloat16", 2, 2560, 72, swiglu=True, dtype="bfloat16"),
    Case("largest, bfloat16", 1, 4104, 264, dtype="bfloat16"),
    Case("largest, 17 rows", 17, 4104, 264, dtype="bfloat16"),
    Case("one row, bfloat16", 1, 133, 576, dtype="bfloat16"),
    Case("one row, swiglu and residual", 1, 52, 1536, True, True, "bfloat16"),
)

# One for each way that `many_rows.choose` goes.
MANY_ROWS_CASES = (
    Case("128 rows, one wave", 128, 6144, 128, dtype="bfloat16"),
    *(
        (
            Case("128 rows, narrow tiles", 128, 4096, 128, dtype="bfloat16"),
            Case("128 rows, tiles of 64", 128, 8192, 128, dtype="float16"),
            Case("128 rows, four parts", 128, 4096, 8448, dtype="bfloat16", num_parts=4),
        )
        if many_rows.loads_ahead(128)
        else (Case("128 rows, two parts", 128, 4096, 256, dtype="bfloat16", num_parts=2),)
    ),
    Case("128 rows, swiglu", 128, 9216, 128, swiglu=True, dtype="bfloat16"),
    Case("256 rows, narrow", 256, 4096, 128, dtype="float16"),
    Case("256 rows, taller", 256, 6144, 128, dtype="bfloat16"),
    Case("256 rows, two parts", 256, 4096, 8320, dtype="bfloat16", num_parts=2),
    Case("256 rows, swiglu", 256, 12288, 128, swiglu=True, dtype="bfloat16"),
    Case("512 rows, swiglu", 512, 12288, 256, swiglu=True, dtype="bfloat16"),
)

# One for each way that `mosaic_few_rows.choose` goes.
AHEAD_CASES = (
    Case("one row, ahead", 1, 6144, 512, dtype="bfloat16"),
    Case("16 rows, ahead, two parts", 16, 4096, 512, dtype="bfloat16", num_parts=2),
    Case("5 rows, ahead, two wide parts", 5, 3008, 6144, dtype="bfloat16", num_parts=2),
    Case("16 rows, ahead, swiglu", 16, 12288, 256, swiglu=True, dtype="bfloat16"),
)

# The four products of Qwen3-8B, plain and with the epilogues that a layer can use, and SmolLM2's.
BENCH_CASES = (
    *(
        Case(f"small {name}, {num_rows} rows", num_rows, outputs, width, **more, dtype="bfloat16")
        for num_rows in (1, 8)
        for name, outputs, width, more in (
            ("qkv", 960, 576, {}),
            ("o", 576, 576, {}),
            ("gate_up + swiglu", 1536, 576, {"swiglu": True}),
            ("down", 576, 1536, {}),
        )
    ),
    *(
        Case(f"{name}, {num_rows} rows", num_rows, outputs, width, dtype="bfloat16")
        for num_rows in (1, 16, 32)
        for name, outputs, width in (
            ("qkv", 6144, 4096),
            ("o", 4096, 4096),
            ("gate_up", 24576, 4096),
            ("down", 4096, 12288),
        )
    ),
    Case("o + residual, 16 rows", 16, 4096, 4096, residual=True, dtype="bfloat16"),
    Case("gate_up + swiglu, 16 rows", 16, 12288, 4096, swiglu=True, dtype="bfloat16"),
    Case("gate_up + swiglu, 32 rows", 32, 12288, 4096, swiglu=True, dtype="bfloat16"),
    Case("down + residual, 16 rows", 16, 4096, 12288, residual=True, dtype="bfloat16"),
    *(
        Case(f"{name}, {num_rows} rows", num_rows, outputs, width, **more, dtype="bfloat16")
        for num_rows, o_parts in ((128, 2), (256, 1))
        for name, outputs, width, more in (
            ("qkv", 6144, 4096, {}),
            ("o", 4096, 4096, {"num_parts": o_parts}),
            ("gate_up + swiglu", 12288, 4096, {"swiglu": True}),
            ("down", 4096, 12288, {"num_parts": 2}),
        )
    ),
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    rows = case.outputs * (2 if case.swiglu else 1)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return array(scale * rng.standard_normal(shape, np.float32), case.dtype)

    x = normal(case.num_rows, case.width)
    weight = normal(rows, case.width, scale=case.width**-0.5)
    residual = normal(case.num_rows, case.outputs) if case.residual else None
    return (x, weight, residual), {"swiglu": case.swiglu, "num_parts": case.num_parts}
