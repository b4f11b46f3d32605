"""Device time of `kv_move` for trees of 32 nodes; its rows are in L2, as in a step."""

from __future__ import annotations

import functools

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.kv_move import kv_move
from kernels_pallas.kv_move.cases import BENCH_CASES, make_inputs


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    best = dispatch.pick("kv_move", head_dim=128).name
    rows = []
    for case in BENCH_CASES:
        (kv_pages, *others), static = make_inputs(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            run = functools.partial(kv_move, **static, implementation=implementation)

            def step(pages, run=run, others=tuple(others)):
                return run(pages, *others), ()

            us = roofline.chained_time(step, kv_pages, repeats=10, calls=8)
            row = {"op": "kv_move", "case": case.name, "implementation": implementation}
            rows.append({**row, "us": round(us, 3)})
    return rows


if __name__ == "__main__":
    measure.main("kv_move", bench)
