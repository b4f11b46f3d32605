"""Runs kernels beside their references on this machine, interpreted where it cannot run them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kernels_pallas import dispatch


def check_kernels(ops: Iterable[str] | None = None, num_cases: int = 3) -> list[dict[str, Any]]:
    """Holds the first cases of each op against its reference.

    Returns one row an op: which implementation ran, on how many cases, in how many seconds.

    Raises:
        UnsupportedKernel: a result differs by more than the rule of `kernels_pallas.testing`.
    """
    rows = []
    for op in dispatch.ops() if ops is None else ops:
        name = runnable(op)
        cases = dispatch.cases_module(op).CASES[:num_cases]
        before = time.perf_counter()
        for case in cases:
            dispatch.self_test(op, name, case)
        seconds = round(time.perf_counter() - before, 1)
        rows.append(
            {"op": op, "implementation": name, "equal to the reference": len(cases), "s": seconds}
        )
    return rows


def runnable(op: str) -> str:
    """The kernel that this machine runs best; JAX's interpreter runs it where no GPU can."""
    name = dispatch.pick(op).name
    if name != dispatch.XLA:
        return name
    return next(iter(dispatch.op_module(op).BACKENDS)) + dispatch.INTERPRET
