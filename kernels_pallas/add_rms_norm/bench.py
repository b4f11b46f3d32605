"""Device time of `add_rms_norm`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.add_rms_norm.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("add_rms_norm", BENCH_CASES)


if __name__ == "__main__":
    measure.main("add_rms_norm", bench)
