"""Named shapes of `kv_write_context`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_write.cases import generator, inverse_frequencies, places, pool
from kernels_pallas.testing import array


class Case(NamedTuple):
    """A batch whose last rows are padding: they all write the same rows of page 0."""

    name: str
    batch: int = 3
    block: int = 5
    layers: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    norm: bool = True
    max_position: int = 40_000
    padding_rows: int = 0


CASES = (
    Case("one layer, one token", 1, 1, 1),
    Case("padding", padding_rows=2),
    Case("five layers of three heads", layers=5, kv_heads=3, dtype="bfloat16"),
    Case("head size 128 without norms", 2, 7, head_dim=128, norm=False),
    Case("one head, float16", 4, 3, kv_heads=1, page_size=32, dtype="float16"),
)

BENCH_CASES = tuple(
    Case(f"batch {batch}, block {block}", batch, block, 5, 8, 128, 64, "bfloat16")
    for batch in (1, 32)
    for block in (1, 16)
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = generator(case.name)
    kv_locs, positions = places(case, rng)
    shape = (case.batch, case.block, case.layers, 2, case.kv_heads, case.head_dim)
    kv = rng.standard_normal(shape, np.float32)
    kv[case.batch - case.padding_rows :] = kv[:1]
    k_norm: jax.Array | None = None
    if case.norm:
        weights = 1 + 0.1 * rng.standard_normal((case.layers, case.head_dim))
        k_norm = array(weights, case.dtype)
    args = (
        array(kv, case.dtype),
        tuple(pool(case, rng) for _ in range(case.layers)),
        array(kv_locs, jnp.int32),
        array(positions, jnp.int32),
        inverse_frequencies(case.head_dim),
    )
    return args, {"k_norm": k_norm, "eps": 1e-6}
