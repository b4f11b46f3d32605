"""Device time of `add_norm_gemm`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.add_norm_gemm.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("add_norm_gemm", BENCH_CASES)


if __name__ == "__main__":
    measure.main("add_norm_gemm", bench)
