"""Device time of `few_row_gemm`, and its share of the copy bandwidth, on Qwen3-8B's shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.few_row_gemm import few_row_gemm
from kernels_pallas.few_row_gemm.cases import BENCH_CASES, Case

# Bytes of the weights of Qwen3-8B's o, qkv, down and gate_up.
COPIES = tuple(2 * 4096 * outputs for outputs in (4096, 6144, 12288, 24576))


def bench() -> list[measure.Row]:
    """One row a case and implementation; bytes are those of weight, rows and result, once each.

    First what a plain copy reaches that moves as many bytes as a product reads: no product of that
    size can be expected to reach more of what a copy of gigabytes does.
    """
    bandwidth = roofline.copy_bandwidth()
    best = dispatch.pick("few_row_gemm").name
    rows = [_copy_row(num_bytes, bandwidth) for num_bytes in COPIES]
    for case in BENCH_CASES:
        sets, num_bytes = _input_sets(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            # XLA's product is whole: it cuts columns for itself.
            num_parts = 1 if implementation == dispatch.XLA else case.num_parts
            run = functools.partial(
                few_row_gemm,
                swiglu=case.swiglu,
                num_parts=num_parts,
                implementation=implementation,
            )
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


def _copy_row(num_bytes: int, bandwidth: float) -> measure.Row:
    """The device's own copy of half as many bytes as it moves, none of them in L2."""
    keys = jax.random.split(jax.random.key(0), 2 * roofline.cold_sets(num_bytes))
    sets = [(jax.random.bits(key, (num_bytes // 8,), jnp.uint32),) for key in keys]
    us = roofline.cold_time(jnp.copy, sets, repeats=20)
    return {
        "op": "few_row_gemm",
        "case": f"copy that moves {num_bytes / 1e6:.1f} MB",
        "implementation": "copy",
        "us": round(us, 3),
        "share_of_copy_bandwidth": round(num_bytes / us / bandwidth, 3),
        "copy_TB_per_s": round(bandwidth / 1e6, 3),
    }


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
