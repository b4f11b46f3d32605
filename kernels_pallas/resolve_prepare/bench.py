"""Device time of `resolve_prepare`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from kernels_pallas import measure
from kernels_pallas.resolve_future.bench import without_relay
from kernels_pallas.resolve_prepare.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases(
        "resolve_prepare", BENCH_CASES, keep=lambda both: (without_relay(both[0]), both[1])
    )


if __name__ == "__main__":
    measure.main("resolve_prepare", bench)
