"""Device time of `few_row_gemm`, and its share of the copy bandwidth, on Qwen3-8B's shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.few_row_gemm import few_row_gemm
from kernels_pallas.few_row_gemm.cases import BENCH_CASES, Case


def bench() -> list[measure.Row]:
    """One row a case and implementation; bytes are those of weight, rows and result, once each."""
    bandwidth = roofline.copy_bandwidth()
    best = dispatch.pick("few_row_gemm").name
    rows = []
    for case in BENCH_CASES:
        sets, num_bytes = _input_sets(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            run = functools.partial(few_row_gemm, swiglu=case.swiglu, implementation=implementation)
            us = roofline.cold_time(run, sets, repeats=20)
            rows.append(
                {
                    "op": "few_row_gemm",
                    "case": case.name,
                    "implementation": implementation,
                    "us": round(us, 3),
                    "share_of_copy_bandwidth": round(num_bytes / us / bandwidth, 3),
                    "copy_TB_per_s": round(bandwidth / 1e6, 3),
                }
            )
    return rows


def _input_sets(case: Case):
    """Sets of arguments with weights of their own, and the bytes of one."""
    weight_rows = case.outputs * (2 if case.swiglu else 1)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (case.num_rows, case.width), case.dtype)
    residual = None
    if case.residual:
        residual = jax.random.normal(keys[1], (case.num_rows, case.outputs), case.dtype)
    itemsize = jnp.dtype(case.dtype).itemsize
    num_bytes = weight_rows * case.width * itemsize
    weights = [
        jax.random.normal(key, (weight_rows, case.width), case.dtype)
        for key in jax.random.split(keys[2], roofline.cold_sets(num_bytes))
    ]
    small = case.num_rows * (case.width + case.outputs * (2 if case.residual else 1))
    return [(x, weight, residual) for weight in weights], num_bytes + small * itemsize


if __name__ == "__main__":
    measure.main("few_row_gemm", bench)
