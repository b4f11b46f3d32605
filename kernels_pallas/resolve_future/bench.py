"""Device time of `resolve_future`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.resolve_future.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("resolve_future", BENCH_CASES)


if __name__ == "__main__":
    measure.main("resolve_future", bench)
