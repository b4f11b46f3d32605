"""Named shapes of `few_row_gemm`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """A product [num_rows, width] x [outputs, width]^T; with swiglu the weight is twice as tall."""

    name: str
    num_rows: int
    outputs: int
    width: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    dtype: str = "float32"


CASES = (
    Case("one row", 1, 128, 256),
    Case("norm before, odd rows", 5, 64, 256, norm=True),
    Case("residual, prime sizes", 17, 67, 131, residual=True),
    Case("swiglu behind a norm, bfloat16", 16, 96, 512, norm=True, swiglu=True, dtype="bfloat16"),
    Case("all at once, 64 rows", 64, 48, 192, norm=True, residual=True, swiglu=True),
    Case("float16", 33, 128, 320, norm=True, residual=True, dtype="float16"),
)


def bench_cases(num_rows: int) -> tuple[Case, ...]:
    """Qwen3-8B's four products, plain and as a layer uses them."""
    shapes = (
        ("qkv", 6144, 4096, {"norm": True}),
        ("o", 4096, 4096, {"residual": True}),
        ("gate_up", 12288, 4096, {"norm": True, "swiglu": True}),
        ("down", 4096, 12288, {"residual": True}),
    )
    cases = []
    for name, outputs, width, fused in shapes:
        plain_outputs = outputs * (2 if name == "gate_up" else 1)
        size = {"width": width, "dtype": "bfloat16"}
        cases.append(Case(f"{name}, {num_rows} rows", num_rows, plain_outputs, **size))
        with_what = " and ".join(fused)
        cases.append(
            Case(f"{name} with {with_what}, {num_rows} rows", num_rows, outputs, **size, **fused)
        )
    return tuple(cases)


BENCH_CASES = tuple(case for num_rows in (1, 16, 32) for case in bench_cases(num_rows))


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    rows = case.outputs * (2 if case.swiglu else 1)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return array(scale * rng.standard_normal(shape, np.float32), case.dtype)

    x = normal(case.num_rows, case.width)
    weight = normal(rows, case.width, scale=case.width**-0.5)
    norm = array(1 + 0.1 * rng.standard_normal(case.width), case.dtype) if case.norm else None
    residual = normal(case.num_rows, case.outputs) if case.residual else None
    return (x, weight, norm, residual), {"eps": 1e-6, "swiglu": case.swiglu}
