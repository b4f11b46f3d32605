"""Device time of `paged_attention`, and its share of the copy bandwidth, on Qwen3-8B's shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.cases import BENCH_CASES, Case

# The reference walks the table in a loop that the host drives; of long contexts it shows no more.
XLA_MAX_CONTEXT = 4096


def bench(cases: Iterable[Case] = BENCH_CASES) -> list[measure.Row]:
    """One row a case and implementation; bytes are those of the KV rows read, once each."""
    bandwidth = roofline.copy_bandwidth()
    best = dispatch.pick("paged_attention", head_dim=128).name
    rows = []
    for case in cases:
        sets, num_bytes = _input_sets(case)
        context = max(case.lens) + case.block
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            if implementation == dispatch.XLA and context > XLA_MAX_CONTEXT:
                continue
            run = functools.partial(paged_attention, implementation=implementation)
            us = roofline.cold_time(run, sets, repeats=3 if implementation == dispatch.XLA else 20)
            rows.append(
                {
                    "op": "paged_attention",
                    "case": case.name,
                    "implementation": implementation,
                    "us": round(us, 3),
                    "share_of_copy_bandwidth": round(num_bytes / us / bandwidth, 3),
                    "copy_TB_per_s": round(bandwidth / 1e6, 3),
                }
            )
    return rows


def _input_sets(case: Case):
    """Sets of arguments over one pool of pages, each with a table of its own, and their bytes."""
    batch = len(case.lens)
    row_bytes = 2 * case.kv_heads * case.head_dim * jnp.dtype(case.dtype).itemsize
    num_bytes = sum(length + case.block for length in case.lens) * row_bytes
    num_sets = roofline.cold_sets(num_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    used = num_sets * batch * case.columns
    tables = 1 + jax.random.permutation(keys[0], used).astype(jnp.int32)
    shape = (used + 1, 2, case.kv_heads, case.page_size, case.head_dim)
    kv_pages = jax.random.normal(keys[1], shape, case.dtype)
    q_shape = (batch, case.block, case.heads, case.head_dim)
    q = jax.random.normal(keys[2], q_shape, case.dtype)
    lens = jnp.array(case.lens, jnp.int32)
    tables = tables.reshape(num_sets, batch, case.columns)
    return [(q, kv_pages, table, lens) for table in tables], num_bytes


if __name__ == "__main__":
    measure.main("paged_attention", bench)
