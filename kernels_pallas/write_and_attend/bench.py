"""Time of `write_and_attend` beside `kv_write` and `paged_attention`, by the wall clock in a chain.

What it saves is a launch, which a profile of single calls does not see: a chain of calls runs in
one command buffer, each behind a kernel that stands for the product before it, all launched early.
Every call attends to KV that is not in L2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, measure, roofline
from kernels_pallas.few_row_gemm.sweep import CALLS, Job, nudge, time_jobs
from kernels_pallas.kv_write import kv_write
from kernels_pallas.kv_write.cases import inverse_frequencies
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.write_and_attend import write_and_attend

_PAGE_SIZE = 64


class Case(NamedTuple):
    """A decode batch in which every row has the same context, the block included."""

    name: str
    batch: int
    block: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 1024

    @property
    def row_bytes(self) -> int:
        """Of the KV of a token."""
        return 2 * 2 * self.kv_heads * self.head_dim


def _cases(model: str, sizes: Iterable[tuple[int, int]], *heads: int) -> tuple[Case, ...]:
    return tuple(
        Case(f"{model}, batch {batch}, {block} tokens, context 1024", batch, block, *heads)
        for batch, block in sizes
    )


BENCH_CASES = (
    *_cases("Qwen3-8B", [(b, n) for b in (1, 8, 32) for n in (1, 16)], 32, 8, 128),
    *_cases("SmolLM2-135M", [(1, 1), (1, 8)], 9, 3, 64),
)


def apart(*args: Any, num_heads: int, num_kv_heads: int, **how: Any) -> tuple[jax.Array, jax.Array]:
    """`write_and_attend` by its two parts; args: as it takes them."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    q, kv_pages = kv_write(*args[:5], **sizes, **how)
    return paged_attention(q, kv_pages, *args[5:], **how), kv_pages


def job(case: Case, label: str, run: Callable[..., tuple[jax.Array, jax.Array]]) -> Job:
    """A chain of calls of `run`, which takes the op's arguments and its numbers of heads."""
    rows, dim = case.batch * case.block, case.head_dim
    num_bytes = case.batch * case.context * case.row_bytes
    num_sets = roofline.cold_sets(num_bytes)
    columns = -(-case.context // _PAGE_SIZE)
    keys = jax.random.split(jax.random.key(0), 3)
    tables = 1 + jax.random.permutation(keys[0], case.batch * columns).astype(jnp.int32)
    table = tables.reshape(case.batch, columns)
    lens = jnp.full((case.batch,), case.context - case.block, jnp.int32)
    positions = lens[:, None] + jnp.arange(case.block, dtype=jnp.int32)[None, :]
    pages = jnp.take_along_axis(table, positions // _PAGE_SIZE, axis=1)
    shape = (1 + tables.size, 2, case.kv_heads, _PAGE_SIZE, dim)
    kv = tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(keys[1], num_sets)
    )
    width = (case.heads + 2 * case.kv_heads) * dim
    qkv = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)
    others = (
        qkv,
        pages * _PAGE_SIZE + positions % _PAGE_SIZE,
        positions,
        inverse_frequencies(dim),
        table,
        lens,
    )
    # A jit of its own, so that a kernel is traced and lowered once.
    once = jax.jit(functools.partial(run, num_heads=case.heads, num_kv_heads=case.kv_heads))

    def chain(carry: Any, qkv: jax.Array, *where: jax.Array) -> Any:
        out, kv = carry[0], list(carry[1])
        for i in range(CALLS):
            block = nudge(qkv, out).reshape(case.batch, case.block, width)
            out, kv[i % num_sets] = once(block, kv[i % num_sets], *where)
            out = out.reshape(rows, -1)
        return out, tuple(kv)

    out = jnp.zeros((rows, case.heads * dim), jnp.bfloat16)
    return Job(case.name, label, chain, others, (out, kv), CALLS, num_bytes)


def bench(cases: Iterable[Case] = BENCH_CASES) -> list[measure.Row]:
    """One row a case and way; a call's time holds the kernel before it."""
    best = dispatch.pick("write_and_attend").name
    how = {"implementation": best, "early_launch": best != dispatch.XLA}
    ways = {"kv_write, paged_attention": apart, "write_and_attend": write_and_attend}
    bandwidth, rows = roofline.copy_bandwidth(), []
    for case in cases:
        # One case at a time: the KV of all of them would be much memory.
        jobs = [job(case, label, functools.partial(run, **how)) for label, run in ways.items()]
        for row in time_jobs(jobs, bandwidth):
            rows.append({"op": "write_and_attend", **row})
    return rows


if __name__ == "__main__":
    measure.main("write_and_attend", bench)
