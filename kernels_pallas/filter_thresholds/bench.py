"""Device time of `filter_thresholds`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.filter_thresholds.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("filter_thresholds", BENCH_CASES)


if __name__ == "__main__":
    measure.main("filter_thresholds", bench)
