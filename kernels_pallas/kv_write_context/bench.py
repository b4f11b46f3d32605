"""Device time of `kv_write_context` on the shapes of Qwen3-8B's five-layer DFlash drafter."""

from __future__ import annotations

import functools

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.kv_write_context import kv_write_context
from kernels_pallas.kv_write_context.cases import BENCH_CASES, make_inputs


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    best = dispatch.pick("kv_write_context", head_dim=128).name
    rows = []
    for case in BENCH_CASES:
        (kv, kv_pages, *others), static = make_inputs(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            run = functools.partial(kv_write_context, **static, implementation=implementation)

            def step(pages, run=run, kv=kv, others=tuple(others)):
                return run(kv, pages, *others), ()

            us = roofline.chained_time(step, kv_pages, repeats=20)
            row = {"op": "kv_write_context", "case": case.name, "implementation": implementation}
            rows.append({**row, "us": round(us, 3)})
    return rows


if __name__ == "__main__":
    measure.main("kv_write_context", bench)
