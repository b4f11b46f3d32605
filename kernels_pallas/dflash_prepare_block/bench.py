"""Device time of `dflash_prepare_block`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.dflash_prepare_block.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("dflash_prepare_block", BENCH_CASES)


if __name__ == "__main__":
    measure.main("dflash_prepare_block", bench)
