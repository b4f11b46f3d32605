from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from kernels_pallas import testing
from kernels_pallas.accept import accept, cases
from tests.kernels import accept_oracle

jitted = jax.jit(accept, static_argnames="implementation")


def run(
    implementation, block_ids, predicted, lens=(10,), max_lens=(99,), stop_ids=((99,),), frozen=None
):
    token = testing.token_dtype()
    return jitted(
        testing.array(block_ids, token),
        testing.array(predicted, token),
        testing.array(lens, jnp.int32),
        testing.array(max_lens, jnp.int32),
        testing.array(stop_ids, token),
        testing.array([False] * len(block_ids) if frozen is None else frozen, bool),
        implementation=implementation,
    )


def oracle(args):
    block_ids, predicted, *limits = map(np.asarray, args)
    emitted = [accept_oracle.walk_chain(*row) for row in zip(block_ids, predicted, strict=True)]
    return accept_oracle.expected(emitted, block_ids, *limits)


def test_every_case_equals_the_oracle(case, implementation, token_width):
    args, _ = cases.make_inputs(case)
    result = jitted(*args, implementation=implementation)
    accept_oracle.assert_accepted(result, oracle(args))


def test_matches_end_at_the_first_wrong_draft(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 9, 3]])
    np.testing.assert_array_equal(result.tokens, [[1, 2, 9, 0]])
    np.testing.assert_array_equal(result.packed, [[1, 2, 9, 0, 3, 2, 0, 0]])
    assert (int(result.bonus[0]), int(result.new_lens[0])) == (9, 13)


def test_all_drafts_right_adds_one_more_token(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 3, 4]])
    np.testing.assert_array_equal(result.packed, [[1, 2, 3, 4, 4, 3, 0, 0]])


@pytest.mark.parametrize("at", range(4))
def test_a_stop_id_ends_the_row_wherever_it_stands_in_the_block(implementation, at):
    predicted = np.array([[1, 2, 3, 4]])
    result = run(implementation, [[5, 1, 2, 3]], predicted, stop_ids=[[predicted[0, at]]])
    assert int(result.num_committed[0]) == at + 1
    assert int(result.num_accepted[0]) == 3
    assert int(result.bonus[0]) == at + 1
    assert bool(result.finished[0])


def test_a_stop_id_after_the_accepted_drafts_is_not_seen(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 9, 3, 4]], stop_ids=[[3]])
    assert int(result.num_committed[0]) == 2
    assert not bool(result.finished[0])


@pytest.mark.parametrize(("room", "committed"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4)])
def test_the_limit_clips_the_block(implementation, room, committed):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 3, 4]], lens=[10], max_lens=[11 + room])
    assert int(result.num_committed[0]) == committed
    assert int(result.new_lens[0]) == 10 + committed
    assert bool(result.finished[0]) == (room <= 4)
    assert int(result.bonus[0]) == (5 if committed == 0 else committed)


def test_a_row_over_its_limit_commits_nothing(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 3, 4]], lens=[10], max_lens=[4])
    np.testing.assert_array_equal(result.packed, [[0, 0, 0, 0, 0, 3, 1, 0]])


def test_a_stop_id_past_the_limit_is_not_committed(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 3, 4]], max_lens=[12], stop_ids=[[2]])
    np.testing.assert_array_equal(result.packed, [[1, 0, 0, 0, 1, 3, 1, 0]])


def test_a_frozen_row_stays_as_it_is(implementation):
    result = run(implementation, [[5, 1, 2, 3]], [[1, 2, 3, 4]], frozen=[True])
    np.testing.assert_array_equal(result.packed, [[0, 0, 0, 0, 0, 0, 1, 0]])
    assert (int(result.bonus[0]), int(result.new_lens[0])) == (5, 10)


def test_predicted_ids_may_be_narrower_than_the_block(implementation):
    with jax.enable_x64(True):
        block_ids = testing.array([[5, 1]], jnp.int64)
        predicted, stop_ids = testing.array([[1, 2]], jnp.int32), testing.array([[9]], jnp.int32)
        lens, max_lens = testing.array([3], jnp.int32), testing.array([50], jnp.int32)
        frozen = testing.array([False], bool)
        result = jitted(
            block_ids, predicted, lens, max_lens, stop_ids, frozen, implementation=implementation
        )
        np.testing.assert_array_equal(result.packed, [[1, 2, 2, 1, 0, 0]])
        assert result.tokens.dtype == result.bonus.dtype == jnp.int64


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_random_blocks_equal_the_oracle(data):
    ids = st.integers(0, 3)
    args = (
        np.array(data.draw(st.lists(ids, min_size=15, max_size=15)), np.int32).reshape(3, 5),
        np.array(data.draw(st.lists(ids, min_size=15, max_size=15)), np.int32).reshape(3, 5),
        np.array(data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3)), np.int32),
        np.array(data.draw(st.lists(st.integers(1, 16), min_size=3, max_size=3)), np.int32),
        np.array(data.draw(st.lists(st.integers(0, 5), min_size=6, max_size=6)), np.int32)
        .reshape(3, 2),
        np.array(data.draw(st.lists(st.booleans(), min_size=3, max_size=3))),
    )  # fmt: skip
    expected = oracle(args)
    for implementation in ("xla", "triton_interpret"):
        result = jitted(*args, implementation=implementation)
        accept_oracle.assert_accepted(result, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": np.zeros(2, np.int32)}, r"block_ids has shape \(2,\), but must be \[B, N\]"),
        ({"predicted": np.zeros((2, 3), np.int32)}, r"predicted has shape .* needs \(2, 4\)"),
        ({"predicted": np.zeros((2, 4), np.float32)}, "predicted is float32, but tokens are"),
        ({"max_lens": np.zeros(2, np.int64)}, "max_lens is int64, but must be int32"),
        ({"lens": np.zeros(3, np.int32)}, r"lens has shape \(3,\), but \[B\] needs \(2,\)"),
        ({"stop_ids": np.zeros(2, np.int32)}, r"stop_ids has shape .* must be \[B, E\]: 2 axes"),
        ({"stop_ids": np.zeros((2, 0), np.int32)}, "num_stop_ids=0 is below 1; give 1 or more"),
        ({"frozen": np.zeros(2, np.int32)}, "frozen is int32, but must be bool; cast it"),
        ({"implementation": "cuda"}, "accept: implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "block_ids": np.zeros((2, 4), np.int32),
        "predicted": np.zeros((2, 4), np.int32),
        "lens": np.ones(2, np.int32),
        "max_lens": np.ones(2, np.int32),
        "stop_ids": np.ones((2, 3), np.int32),
        "frozen": np.zeros(2, bool),
    }
    with pytest.raises(ValueError, match=message):
        accept(**(arguments | change))
