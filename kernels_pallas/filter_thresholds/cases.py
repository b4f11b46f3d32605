"""Named shapes of `filter_thresholds`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.testing import array


class Case(NamedTuple):
    """Scores of a verified block; settings differ from row to row unless they are given."""

    name: str
    batch: int
    block_size: int
    vocab_size: int
    top_k: int | None = None
    top_p: float | None = None


CASES = (
    Case("one token", 1, 1, 1),
    Case("plain decoding", 5, 1, 131),
    Case("prime sizes", 7, 3, 997),
    Case("several chunks", 6, 2, 9001),
)

BENCH_CASES = tuple(
    Case(f"batch {batch}, block of {block_size}, {what}", batch, block_size, vocab_size, *asked)
    for batch, block_size, vocab_size in ((8, 1, 49_152), (8, 16, 49_152), (32, 16, 151_936))
    for what, asked in (("no filter", (0, 1.0)), ("top-k and top-p", (50, 0.9)))
)

# Shares between these are reached by whole groups of equal scores, whatever the order of a sum.
_TOP_P = (1.0, 0.05, 0.3, 0.8, 0.95)
_TOP_K = (0, 1, 2, 50, 1 << 30)


def make_inputs(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Arguments of the op; it has no static keywords.

    Scores have few different values, 40 steps of an eighth with a quarter of them at -inf, so that
    no share of the probability lies within a rounding of top_p.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    shape = case.batch, case.block_size, case.vocab_size
    scores = -rng.integers(0, 40, shape) / 8.0
    scores[rng.random(shape) < 0.25] = -np.inf
    scores[..., -1] = 0.0
    scores[::2] = np.where(np.isfinite(scores[::2]), 5 + scores[::2], -np.inf)
    rows = np.arange(case.batch)
    top_k = np.array(_TOP_K)[rows % len(_TOP_K)]
    top_p = np.array(_TOP_P)[rows * 2 % len(_TOP_P)]
    if case.top_k is not None:
        top_k, top_p = np.full(case.batch, case.top_k), np.full(case.batch, case.top_p)
    return (array(scores, jnp.float32), array(top_k, jnp.int32), array(top_p, jnp.float32)), {}
