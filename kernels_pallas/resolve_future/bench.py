"""Device time of `resolve_future`; run as a module, `--out FOLDER` keeps the figures."""

from __future__ import annotations

from typing import Any

from kernels_pallas import measure
from kernels_pallas.resolve_future import ResolvedFuture
from kernels_pallas.resolve_future.cases import BENCH_CASES


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    return measure.bench_cases("resolve_future", BENCH_CASES, keep=without_relay)


def without_relay(resolved: ResolvedFuture) -> tuple[Any, ...]:
    """What a batch reads; the relay arrays, which a step owns and donates, would be copied."""
    return resolved.tokens, resolved.lens, resolved.carry, resolved.errors


if __name__ == "__main__":
    measure.main("resolve_future", bench)
