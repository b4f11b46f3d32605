"""Named shapes of `add_norm_qkv`, for its tests, its bench and the self-test at start."""

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
    batch: int = 1
    block: int = 1
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    max_position: int = 40_000
    padding_rows: int = 0
    num_layers: int | None = None  # norms to choose from; None: one norm, no choice


CASES = (
    Case("one token, bfloat16", width=576, heads=9, kv_heads=3, dtype="bfloat16"),
    Case("padding", 3, 5, 96, padding_rows=2),
    Case("third of four layers", 2, 4, 160, 3, 1, 32, num_layers=4),
    Case("8 tokens, bfloat16", 1, 8, 576, 9, 3, 64, 64, "bfloat16"),
)

# SmolLM2-135M's.
BENCH_CASES = tuple(
    Case(f"block {block}", 1, block, 576, 9, 3, 64, 64, "bfloat16") for block in (1, 8, 16)
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = generator(case.name)
    kv_locs, positions = places(case, rng)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return array(mean + scale * rng.standard_normal(shape, np.float32), case.dtype)

    # Padding rows write the same.
    x, delta = (np.array(normal(case.batch, case.block, case.width)) for _ in range(2))
    for rows in (x, delta):
        rows[case.batch - case.padding_rows :] = rows[:1]
    stack = () if case.num_layers is None else (case.num_layers,)
    heads = case.heads + 2 * case.kv_heads
    args = (
        array(x.reshape(-1, case.width), case.dtype),
        array(delta.reshape(-1, case.width), case.dtype),
        normal(*stack, case.width, scale=0.1, mean=1.0),
        normal(heads * case.head_dim, case.width, scale=case.width**-0.5),
        pool(case, rng),
        array(kv_locs, jnp.int32),
        array(positions, jnp.int32),
        inverse_frequencies(case.head_dim),
        array([2], np.int32) if stack else None,
    )
    return args, {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "eps": 1e-6}
