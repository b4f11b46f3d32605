"""Device time of `add_norm_qkv`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.add_norm_qkv.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    # Without the pages, which a step updates in place.
    return measure.bench_cases("add_norm_qkv", BENCH_CASES, keep=lambda results: results[:2])


if __name__ == "__main__":
    measure.main("add_norm_qkv", bench)
