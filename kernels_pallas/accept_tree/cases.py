"""Named shapes of `accept_tree`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.accept.cases import BENCH_CASES, Case, make_limits
from kernels_pallas.resolve_future.cases import generator
from kernels_pallas.testing import array, token_dtype

__all__ = ["BENCH_CASES", "CASES", "Case", "make_inputs"]

CASES = (
    Case("one row", 1),
    Case("root alone", 3, block_size=1, vocab_size=8),
    Case("smallest tree", 17, block_size=2, num_stop_ids=1, vocab_size=3),
    Case("few tokens, deep paths", 31, block_size=13, num_stop_ids=3, vocab_size=2),
    Case("largest tree", 7, block_size=64, num_stop_ids=5, vocab_size=6),
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the op: random trees, a fifth of the nodes unused, twins among siblings."""
    rng = generator(case.name)
    shape = (case.batch, case.block_size)
    block_ids = rng.integers(0, case.vocab_size, shape)
    parents = np.floor(rng.random(shape) * np.arange(case.block_size)).astype(int)
    parents = np.where(rng.random(shape) < 0.2, -1, parents)
    parents[:, 0] = -1
    predicted = rng.integers(0, case.vocab_size, shape)
    # Half of the nodes predict one of their children, so that paths get long.
    for b, child in np.argwhere((parents >= 0) & (rng.random(shape) < 0.5)):
        predicted[b, parents[b, child]] = block_ids[b, child]
    return (
        array(block_ids, token_dtype()),
        array(parents, jnp.int32),
        array(predicted, token_dtype()),
        *make_limits(case, rng, predicted),
    ), {}
