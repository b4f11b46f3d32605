"""Named shapes of `write_and_attend`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_write.cases import generator, inverse_frequencies
from kernels_pallas.paged_attention import cases as attention_cases
from kernels_pallas.testing import array


class Case(NamedTuple):
    """A batch; NaN is what no query may read: page 0, and all from each block's rows on, too."""

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
    padding_rows: int = 0  # at the end: lens 0 and a table of page 0; they all write the same
    norm: bool = True
    num_layers: int | None = None  # norms to choose from; None: one of each, no choice


CASES = (
    Case("one token, lengths around a page", (0, 1, 15, 16, 17, 37, 127), padding_rows=2),
    Case("block of 5, to and past the table's end", (0, 11, 107, 109), 5, kv_heads=2, columns=7),
    Case("a long row", (2000, 3), 3, heads=4, columns=128, norm=False),
    Case("block of 16, bfloat16", (0, 100), 16, heads=8, kv_heads=2, dtype="bfloat16"),
    Case("draft block", (0, 15, 30), block=7, causal=False, padding_rows=1, num_layers=4),
    Case("window around a page", (14, 15, 16, 40, 101), block=4, window=17),
    Case("a window that the block fills", (40, 3), block=4, window=1),
    Case("draft block in a window", (2, 63), block=9, window=5, causal=False),
    Case("trees", (0, 21), block=13, tree=True, heads=3, padding_rows=1),
    Case("group of 1, pages of 32", (31, 32, 33), 6, 1, 1, 128, 32, columns=3),
    Case("group of 3, pages of 64", (63, 64, 65), 2, 9, 3, 64, 64, columns=3, norm=False),
    Case("group of 4, pages of 128", (127, 128, 129), 3, 4, 1, 128, 128, columns=2),
    Case("group of 8, float16", (17, 90), 16, 8, 1, 64, dtype="float16"),
)


def make_inputs(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Arguments and static keywords of the op; pages in random order, the first one shared."""
    shared = case._asdict()
    own = {"norm": shared.pop("norm"), "num_layers": shared.pop("num_layers")}
    (_, kv_pages, page_table, lens), static = attention_cases.make_inputs(
        attention_cases.Case(**shared)
    )
    rng = generator(case.name)
    batch, size = len(lens), case.page_size
    offsets = np.arange(case.block)[None, :]
    places = np.asarray(lens)[:, None] + offsets
    column = np.minimum(places // size, case.columns - 1)
    page = np.where(places < case.columns * size, np.take_along_axis(page_table, column, axis=1), 0)
    kv_pages = np.array(kv_pages)
    kv_pages[page, :, :, places % size] = np.nan
    if case.tree:
        offsets = np.bitwise_count(np.asarray(static["block_mask"])).sum(-1) - 1
    heads = case.heads + 2 * case.kv_heads
    qkv = rng.standard_normal((batch, case.block, heads * case.head_dim), np.float32)
    qkv[len(case.lens) :] = qkv[:1]
    stack = () if own["num_layers"] is None else (own["num_layers"],)
    q_norm, k_norm = (
        array(1 + 0.1 * rng.standard_normal((*stack, case.head_dim)), case.dtype)
        if own["norm"]
        else None
        for _ in range(2)
    )
    static |= {"num_heads": case.heads, "num_kv_heads": case.kv_heads}
    static |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    if stack:
        static["layer"] = array([2], jnp.int32)
    args = (
        array(qkv, case.dtype),
        array(kv_pages, case.dtype),
        array(page * size + places % size, jnp.int32),
        array(np.asarray(lens)[:, None] + offsets, jnp.int32),
        inverse_frequencies(case.head_dim),
        page_table,
        lens,
    )
    return args, static
