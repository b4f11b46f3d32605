"""Named shapes of `accept`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels_pallas.resolve_future.cases import generator
from kernels_pallas.testing import array, token_dtype


class Case(NamedTuple):
    """A verified batch: right drafts, wrong ones, stop ids, limits and frozen rows mixed."""

    name: str
    batch: int
    block_size: int = 16
    num_stop_ids: int = 4
    vocab_size: int = 151_936


CASES = (
    Case("one row", 1),
    Case("plain decoding", 5, block_size=1, vocab_size=8),
    Case("smallest block", 17, block_size=2, num_stop_ids=1, vocab_size=3),
    Case("odd sizes", 31, block_size=7, num_stop_ids=3, vocab_size=5),
    Case("power of two with the extra columns", 23, block_size=12, vocab_size=40),
    Case("largest block", 13, block_size=64, num_stop_ids=5, vocab_size=400),
)

BENCH_CASES = tuple(Case(f"batch {batch}", batch) for batch in (1, 8, 32, 256))


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the op; it has no static keywords."""
    rng = generator(case.name)
    shape = (case.batch, case.block_size)
    block_ids = rng.integers(0, case.vocab_size, shape)
    # Row b's first b % N drafts are right, the rest by chance.
    predicted = rng.integers(0, case.vocab_size, shape)
    right = (
        np.arange(case.block_size)[None, :-1] < (np.arange(case.batch) % case.block_size)[:, None]
    )
    predicted[:, :-1] = np.where(right, block_ids[:, 1:], predicted[:, :-1])
    return (
        array(block_ids, token_dtype()),
        array(predicted, token_dtype()),
        *make_limits(case, rng, predicted),
    ), {}


def make_limits(case: Case, rng: np.random.Generator, predicted: np.ndarray) -> tuple[Any, ...]:
    """lens, max_lens, stop_ids, frozen: every third row stops early, room is 0 .. N+2."""
    batch, block_size = predicted.shape
    lens = rng.integers(1, 3000, batch)
    max_lens = lens + 1 + rng.integers(0, block_size + 3, batch)
    stop_ids = np.full((batch, case.num_stop_ids), case.vocab_size)
    stop_ids[:, 0] = rng.integers(0, case.vocab_size, batch)
    at = rng.integers(0, block_size, batch)
    stop_ids[::3, -1] = predicted[np.arange(batch), at][::3]
    return (
        array(lens, jnp.int32),
        array(max_lens, jnp.int32),
        array(stop_ids, token_dtype()),
        array(rng.random(batch) < 0.15, bool),
    )
