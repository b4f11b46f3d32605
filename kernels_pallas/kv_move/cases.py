"""Named shapes of `kv_move`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_write.cases import generator
from kernels_pallas.testing import array


class Case(NamedTuple):
    """Trees of `nodes` nodes, of which paths of random lengths are moved; padding moves nothing."""

    name: str
    batch: int = 3
    nodes: int = 12
    width: int = 5  # of the longest path without its root, which stays
    layers: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    padding_rows: int = 0
    whole_paths: bool = False  # every path is the longest there is, and moves as a whole


CASES = (
    Case("one layer, one row to move", 1, 2, 1, 1),
    Case("padding", padding_rows=2),
    Case("three heads, pages of four", 5, 32, 7, 3, kv_heads=3, page_size=4, dtype="bfloat16"),
    Case("whole paths", 2, 40, 16, 3, page_size=8, whole_paths=True),
    Case("more heads than a program takes", 2, 64, 63, kv_heads=8, head_dim=128, dtype="float16"),
)

BENCH_CASES = tuple(
    Case(f"{name}, batch {batch}", batch, 32, 7, layers, heads, dim, 64, "bfloat16")
    for name, layers, heads, dim in (("smollm2-135m", 30, 3, 64), ("qwen3-8b", 36, 8, 128))
    for batch in (1, 8, 32)
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the op: each request's nodes in pages of its own, page order at random."""
    rng = generator(case.name)
    columns = 1 + -(-case.nodes // case.page_size)
    order = 1 + rng.permutation(case.batch * columns).reshape(case.batch, columns)
    node = rng.integers(0, case.page_size, (case.batch, 1)) + np.arange(case.nodes)
    locs = np.take_along_axis(order, node // case.page_size, axis=1) * case.page_size
    locs += node % case.page_size
    longest = min(case.width, case.nodes - 1)
    sources = np.broadcast_to(locs[:, :1], (case.batch, case.width)).copy()
    # Past a path's end the null page, at the offsets that the chain would have there.
    places = np.broadcast_to(np.arange(case.width) % case.page_size, sources.shape).copy()
    for b in range(case.batch - case.padding_rows):
        first = case.nodes - longest if case.whole_paths else 1
        length = longest if case.whole_paths else int(rng.integers(0, longest + 1))
        path = np.sort(rng.choice(np.arange(first, case.nodes), length, replace=False))
        sources[b, :length], places[b, :length] = locs[b, path], locs[b, 1 : length + 1]
    shape = (1 + case.batch * columns, 2, case.kv_heads, case.page_size, case.head_dim)
    kv_pages = tuple(
        array(rng.standard_normal(shape, np.float32), case.dtype) for _ in range(case.layers)
    )
    return (kv_pages, array(sources, jnp.int32), array(places, jnp.int32)), {}
