"""Named shapes of `kv_write`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """A batch whose last rows are padding: they all write the same rows of page 0."""

    name: str
    batch: int = 3
    block: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    normed: str = "qk"  # heads that have a norm
    max_position: int = 40_000
    padding_rows: int = 0
    num_layers: int | None = None  # norms to choose from; None: one of each, no choice


CASES = (
    Case("one token", 1, 1),
    Case("padding", padding_rows=2),
    Case("nine and three heads", heads=9, kv_heads=3, normed=""),
    Case("head size 128, bfloat16", heads=8, head_dim=128, dtype="bfloat16"),
    Case("float16 without norms", heads=2, kv_heads=1, dtype="float16", normed=""),
    Case("a norm of q alone", normed="q"),
    Case("a norm of k alone", normed="k"),
    Case("many tokens", 33, 8, page_size=32),
    Case("third of four layers", num_layers=4),
    Case("far positions", 2, 13, page_size=128, max_position=131_072),
)

BENCH_CASES = tuple(
    Case(f"batch {batch}, block {block}", batch, block, 32, 8, 128, 64, "bfloat16")
    for batch in (1, 8, 32)
    for block in (1, 16)
)


def make_inputs(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = generator(case.name)
    kv_locs, positions = places(case, rng)
    heads = case.heads + 2 * case.kv_heads
    qkv = rng.standard_normal((case.batch, case.block, heads * case.head_dim), np.float32)
    qkv[case.batch - case.padding_rows :] = qkv[:1]
    stack = () if case.num_layers is None else (case.num_layers,)
    norms = [
        array(1 + 0.1 * rng.standard_normal((*stack, case.head_dim)), case.dtype)
        if which in case.normed
        else None
        for which in "qk"
    ]
    static = {"num_heads": case.heads, "num_kv_heads": case.kv_heads}
    static |= {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    if stack:
        static["layer"] = array([2], jnp.int32)
    args = (
        array(qkv, case.dtype),
        pool(case, rng),
        array(kv_locs, jnp.int32),
        array(positions, jnp.int32),
        inverse_frequencies(case.head_dim),
    )
    return args, static


def generator(name: str) -> np.random.Generator:
    """The case's own random numbers, the same in every process."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def places(case: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """kv_locs and positions [B, N]: each row to a random stretch of positions, any free places."""
    free = np.arange(case.page_size, num_pages(case) * case.page_size)
    kv_locs = rng.permutation(free)[: case.batch * case.block].reshape(case.batch, case.block)
    start = rng.integers(0, case.max_position - case.block, (case.batch, 1))
    positions = start + np.arange(case.block)
    padding = slice(case.batch - case.padding_rows, case.batch)
    kv_locs[padding], positions[padding] = np.arange(case.block), np.arange(case.block)
    return kv_locs, positions


def pool(case: Any, rng: np.random.Generator) -> jax.Array:
    """Pages [P, 2, J, G, D] that hold NaN where nothing is written, as a poisoned pool would."""
    shape = (num_pages(case), 2, case.kv_heads, case.page_size, case.head_dim)
    held = rng.standard_normal(shape, np.float32)
    held[rng.random(shape[0]) < 0.5] = np.nan
    return array(held, case.dtype)


def num_pages(case: Any) -> int:
    """Twice what the batch fills, and page 0."""
    return 1 + -(-2 * case.batch * case.block // case.page_size)


def inverse_frequencies(head_dim: int, base: float = 1e6) -> jax.Array:
    """f32[D / 2] of plain rotary embeddings."""
    return array(base ** (-np.arange(0, head_dim, 2) / head_dim), jnp.float32)
