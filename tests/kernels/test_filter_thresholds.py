from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.filter_thresholds import cases, filter_thresholds
from tests.kernels import jitting


def oracle(scores, top_k, top_p):
    """Thresholds of [B, N, V] by sorting, in float64."""
    batch, block_size, vocab_size = scores.shape
    found = np.full((batch, block_size), -np.inf)
    for b in range(batch):
        for n in range(block_size):
            row = np.asarray(scores[b, n], np.float64)
            kept = np.sort(row)[::-1][: top_k[b] if 0 < top_k[b] < vocab_size else None]
            if 0 < top_k[b] <= vocab_size:
                found[b, n] = kept[-1]
                kept = np.sort(row[row >= kept[-1]])[::-1]  # equal scores stay together
            if top_p[b] < 1:
                weights = np.exp(kept - kept[0])
                reached = np.cumsum(weights) >= top_p[b] * weights.sum()
                found[b, n] = max(found[b, n], kept[np.argmax(reached)])
    return found


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    actual = jitting.jit(filter_thresholds, implementation, **static)(*args)
    chex.assert_shape(actual, (case.batch, case.block_size))
    chex.assert_type(actual, jnp.float32)
    np.testing.assert_array_equal(actual, oracle(*map(np.asarray, args)))


@pytest.mark.parametrize("vocab_size", [31, 5000])
def test_all_numbers_are_told_apart(implementation, vocab_size):
    """Scores of all sizes and signs, each once: a threshold a bit off keeps one more or less."""
    rng = np.random.default_rng(vocab_size)
    sizes = 10.0 ** rng.uniform(-30, 30, (9, 1, vocab_size)) * rng.choice([-1, 1], vocab_size)
    scores = sizes.astype(np.float32)
    top_k = np.array([1, 2, 3, 7, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1, -1])
    top_k, top_p = top_k.astype(np.int32), np.ones(9, np.float32)
    actual = jitting.jit(filter_thresholds, implementation)(scores, top_k, top_p)
    np.testing.assert_array_equal(actual, oracle(scores, top_k, top_p))


def test_edges(implementation):
    """Shares at zero, rows of one possible token, zeros of both signs, and NaN in its own row."""
    low, nan = -np.inf, np.nan
    rows = np.array(
        [
            [1, 3, 2, 3],
            [low, low, 7, low],
            [0.0, -0.0, -1, -1],
            [low] * 4,
            [nan, 1, 2, 3],
            [4, 1, 2, 3],
        ],
        np.float32,
    )
    top_k = np.array([0, 3, 1, 2, 2, 2], np.int32)
    top_p = np.array([0.0, 0.5, 1.0, 0.5, 0.5, 1.0], np.float32)
    actual = jitting.jit(filter_thresholds, implementation)(rows[:, None], top_k, top_p)[:, 0]
    kept = rows >= np.asarray(actual)[:, None]
    assert kept[[0, 1, 2, 5]].tolist() == [
        [False, True, False, True],
        [False, False, True, False],
        [True, True, False, False],
        [True, False, False, True],
    ]


def test_a_row_does_not_depend_on_its_neighbours(implementation):
    """What plain decoding and a verified block choose by must be the same to the last bit."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 4, 5001)).astype(np.float32)
    top_k, top_p = np.array([40, 0, 9], np.int32), np.array([0.9, 0.37, 1.0], np.float32)
    run = jitting.jit(filter_thresholds, implementation)
    block = run(scores, top_k, top_p)
    for n in range(4):
        alone = run(scores[1:2, n : n + 1], top_k[1:2], top_p[1:2])
        if implementation != "xla":  # XLA may sum in another order in another shape
            np.testing.assert_array_equal(alone[0, 0], block[1, n])
        np.testing.assert_array_equal(run(scores[::-1], top_k[::-1], top_p[::-1])[::-1], block)


def test_rows_that_filter_nothing_cost_no_pass():
    """The reference's 32 passes stand behind conditions that only a filtering row makes true."""
    args = jnp.zeros((2, 3, 16)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    jaxpr = jax.make_jaxpr(filter_thresholds)(*args)
    outside = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert not {"while", "scan"} & set(outside)
    assert outside.count("cond") == 2


def test_shapes_and_dtypes_are_checked():
    scores, top_k, top_p = jnp.zeros((2, 1, 8)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    for args in [
        (scores[0], top_k, top_p),
        (scores, top_k[1:], top_p),
        (scores, top_k, top_p[1:]),
        (scores.astype(jnp.bfloat16), top_k, top_p),
        (scores, top_p, top_p),
    ]:
        with pytest.raises(AssertionError):
            filter_thresholds(*args)
