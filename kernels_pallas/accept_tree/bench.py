"""Device time of `accept_tree`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.accept_tree.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("accept_tree", BENCH_CASES)


if __name__ == "__main__":
    measure.main("accept_tree", bench)
