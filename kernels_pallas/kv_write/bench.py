"""Device time of `kv_write` on Qwen3-8B's shapes; its rows are in L2, as in a step."""

from __future__ import annotations

import functools

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.kv_write import kv_write
from kernels_pallas.kv_write.cases import BENCH_CASES, make_inputs


def bench() -> list[measure.Row]:
    """One row a case and implementation."""
    best = dispatch.pick("kv_write", head_dim=128).name
    rows = []
    for case in BENCH_CASES:
        (qkv, kv_pages, *others), static = make_inputs(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            run = functools.partial(kv_write, **static, implementation=implementation)

            def step(pages, run=run, qkv=qkv, others=tuple(others)):
                q, pages = run(qkv, pages, *others)
                return pages, q

            us = roofline.chained_time(step, kv_pages, repeats=20)
            row = {"op": "kv_write", "case": case.name, "implementation": implementation}
            rows.append({**row, "us": round(us, 3)})
    return rows


if __name__ == "__main__":
    measure.main("kv_write", bench)
