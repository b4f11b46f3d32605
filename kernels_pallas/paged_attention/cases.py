"""Named shapes of `paged_attention`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """A batch; whatever no query may read is NaN: page 0, rows past the end, before the window."""

    name: str
    lens: tuple[int, ...]
    block: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    columns: int = 8  # of the page table
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    tree: bool = False
    padding_rows: int = 0  # at the end: lens 0 and a table of page 0


CASES = (
    Case("one token, lengths around a page", (0, 1, 15, 16, 17, 37, 127), padding_rows=1),
    Case("block of 5, to and past the table's end", (0, 11, 107, 109), 5, kv_heads=2, columns=7),
    Case("a long row", (2000, 3), 3, heads=4, columns=128),
    Case("64 tokens", (0, 63), block=64),
    Case("block of 16, bfloat16", (0, 100), block=16, heads=8, kv_heads=2, dtype="bfloat16"),
    Case("draft block", (0, 15, 30), block=7, causal=False, padding_rows=1),
    Case("window around a page", (14, 15, 16, 40, 101), block=4, window=17),
    Case("draft block in a window", (2, 63), block=9, window=5, causal=False),
    Case("trees of two words", (0, 21), block=40, tree=True, heads=3, padding_rows=1),
    Case("group of 1, pages of 32", (31, 32, 33), 6, 1, 1, 128, 32, columns=3),
    Case("group of 3, pages of 64", (63, 64, 65), 2, 9, 3, 64, 64, columns=3),
    Case("group of 4, pages of 128", (127, 128, 129), 3, 4, 1, 128, 128, columns=2),
    Case("group of 8, float16", (17, 90), 4, 8, 1, 64, dtype="float16"),
    # Those of whole heads of 128 that Mosaic's kernel of blocks takes.
    Case("block of 16, 128 wide", (0, 100, 48), 16, 8, 2, 128, 64, 3, "bfloat16"),
    Case("block of 8, pages of 16", (500, 5, 57), 8, 4, 1, 128, 16, 33, "float16", padding_rows=1),
    Case("draft block of 24, pages of 128", (600, 250), 24, 2, 1, 128, 128, 5, "bfloat16", False),
)


def bench_case(batch: int, block: int, context: int, page_size: int = 64) -> Case:
    """Qwen3-8B's attention."""
    return Case(
        f"batch {batch}, {block} queries, context {context}",
        (context - block,) * batch,
        block,
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=page_size,
        columns=context // page_size,
        dtype="bfloat16",
    )


# One conversation of 32768 among 31 of 1024, and lengths of a running server.
RAGGED = bench_case(32, 16, 32768)._replace(
    name="batch 32, 16 queries, one of 32768 and 31 of 1024", lens=(32752, *[1008] * 31)
)
SERVED = bench_case(32, 16, 4096)._replace(
    name="batch 32, 16 queries, contexts 128 to 4096", lens=tuple(range(112, 4081, 128))
)

BENCH_CASES = (
    *(
        bench_case(batch, block, context)
        for context in (1024, 4096, 32768)
        for batch in (1, 8, 32)
        for block in (1, 16)
        if (batch, context) != (8, 32768)
    ),
    RAGGED,
    SERVED,
)


def make_inputs(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Arguments and static keywords of the op; pages in random order, the first one shared."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    lens = np.array([*case.lens, *[0] * case.padding_rows])
    batch, size = len(lens), case.page_size
    num_pages = 1 + batch * case.columns
    page_table = 1 + rng.permutation(num_pages - 1).reshape(batch, case.columns)
    page_table[lens >= size, 0] = page_table[0, 0]
    readable = np.zeros((num_pages, size), bool)
    for b, length in enumerate(case.lens):
        end = min(length + case.block, case.columns * size)
        start = 0 if case.window is None else max(length - case.window + 1, 0)
        rows = np.arange(start, end)
        readable[page_table[b, rows // size], rows % size] = True
        page_table[b, -(-end // size) :] = 0
    page_table[len(case.lens) :] = 0
    shape = (2, case.kv_heads, size, case.head_dim)
    pages = rng.standard_normal((num_pages, *shape), np.float32)
    pages = np.where(readable[:, None, None, :, None], pages, np.nan)
    q = rng.standard_normal((batch, case.block, case.heads, case.head_dim), np.float32)
    static: dict[str, Any] = {"causal": case.causal, "window": case.window}
    if case.tree:
        static["block_mask"] = jnp.asarray(ancestors(rng, batch, case.block))
    args = (array(q, case.dtype), array(pages, case.dtype))
    return (*args, array(page_table, jnp.int32), array(lens, jnp.int32)), static


def ancestors(rng: np.random.Generator, batch: int, block: int) -> np.ndarray:
    """u32[B, N, ceil(N / 32)]: random trees, node 0 the root, every node after its parent."""
    mask = np.zeros((batch, block, -(-block // 32)), np.uint32)
    for b in range(batch):
        for node in range(block):
            if node:
                mask[b, node] = mask[b, rng.integers(node)]
            mask[b, node, node // 32] |= np.uint32(1 << (node % 32))
    return mask
