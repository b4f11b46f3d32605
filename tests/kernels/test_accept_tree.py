from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.accept import accept
from kernels_pallas.accept import cases as accept_cases
from kernels_pallas.accept_tree import accept_tree, cases
from tests.kernels import accept_oracle

jitted = jax.jit(accept_tree, static_argnames="implementation")


def run(implementation, block_ids, parents, predicted, stop_id=99, max_len=99, frozen=False):
    token = testing.token_dtype()
    return jitted(
        testing.array([block_ids], token),
        testing.array([parents], jnp.int32),
        testing.array([predicted], token),
        testing.array([10], jnp.int32),
        testing.array([max_len], jnp.int32),
        testing.array([[stop_id]], token),
        testing.array([frozen], bool),
        implementation=implementation,
    )


#        5
#      /   \
#     1     2
#    / \     \
#   3   4     3
#             |
#             6
TREE = [5, 1, 2, 3, 4, 3, 6]
PARENTS = [-1, 0, 0, 1, 1, 2, 5]


def test_every_case_equals_the_oracle(case, implementation, token_width):
    args, _ = cases.make_inputs(case)
    block_ids, parents, predicted, *limits = args
    walks = [
        accept_oracle.walk_tree(*row)
        for row in zip(*map(np.asarray, (block_ids, parents, predicted)), strict=True)
    ]
    expected = accept_oracle.expected([tokens for tokens, _ in walks], block_ids, *limits)
    paths, frozen = np.zeros(block_ids.shape, int), np.asarray(limits[-1])
    for b, (_, path) in enumerate(walks):
        if not frozen[b]:
            paths[b, : len(path)] = path
    result = jitted(*args, implementation=implementation)
    accept_oracle.assert_accepted(result.accepted, expected)
    assert result.path.dtype == jnp.int32
    np.testing.assert_array_equal(result.path, paths)


def test_the_walk_follows_the_predictions_to_a_leaf(implementation):
    result = run(implementation, TREE, PARENTS, [2, 0, 3, 0, 0, 6, 8])
    np.testing.assert_array_equal(result.path, [[0, 2, 5, 6, 0, 0, 0]])
    np.testing.assert_array_equal(result.accepted.tokens, [[2, 3, 6, 8, 0, 0, 0]])
    assert int(result.accepted.num_accepted[0]) == 3
    assert int(result.accepted.bonus[0]) == 8


def test_a_token_under_another_parent_is_no_child(implementation):
    result = run(implementation, TREE, PARENTS, [3, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(result.accepted.packed, [[3, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]])


def test_the_first_of_two_equal_children_is_taken(implementation):
    result = run(
        implementation, [5, 1, 1, 7, 1, 1, 1], [-1, 0, 0, 2, 0, 3, 3], [1, 8, 7, 0, 0, 0, 0]
    )
    np.testing.assert_array_equal(result.path, [[0, 1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(result.accepted.tokens, [[1, 8, 0, 0, 0, 0, 0]])


def test_the_path_goes_on_where_a_stop_id_clips_the_tokens(implementation):
    result = run(implementation, TREE, PARENTS, [2, 0, 3, 0, 0, 6, 8], stop_id=3)
    np.testing.assert_array_equal(result.accepted.tokens, [[2, 3, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(result.path, [[0, 2, 5, 6, 0, 0, 0]])
    assert bool(result.accepted.finished[0])


def test_the_limit_clips_a_path(implementation):
    result = run(implementation, TREE, PARENTS, [2, 0, 3, 0, 0, 6, 8], max_len=14)
    np.testing.assert_array_equal(result.accepted.packed, [[2, 3, 6, 0, 0, 0, 0, 3, 3, 1, 0]])


def test_zeros_after_the_path_are_no_stop_id(implementation):
    result = run(implementation, TREE, PARENTS, [1, 9, 9, 9, 9, 9, 9], stop_id=0)
    assert not bool(result.accepted.finished[0])


def test_a_frozen_row_walks_nowhere(implementation):
    result = run(implementation, TREE, PARENTS, [2, 0, 3, 0, 0, 6, 8], frozen=True)
    np.testing.assert_array_equal(result.path, np.zeros((1, 7)))
    np.testing.assert_array_equal(result.accepted.packed, [[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]])


@pytest.mark.parametrize("parents", [[0, 0, 1], [2, 2, 1], [6, 1, 2]])
def test_a_walk_over_senseless_parents_ends(implementation, parents):
    result = run(implementation, [4] * 7, [*parents, -1, -1, -1, -1], [4] * 7)
    assert int(result.accepted.num_accepted[0]) < 3


def test_a_chain_is_accepted_as_a_plain_block_is(implementation):
    case = accept_cases.Case("chain", 31, block_size=13, num_stop_ids=3, vocab_size=2)
    (block_ids, *rest), _ = accept_cases.make_inputs(case)
    chain = jnp.arange(case.block_size, dtype=jnp.int32) - 1
    parents = jnp.broadcast_to(chain, block_ids.shape)
    tree = jitted(block_ids, parents, *rest, implementation=implementation)
    plain = jax.jit(accept)(block_ids, *rest)
    for actual, expected in zip(tree.accepted, plain, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": np.zeros((2, 3), np.int32)}, r"parents has shape .* needs \(2, 4\)"),
        ({"parents": np.zeros((2, 4), np.int64)}, "parents is int64, but must be int32"),
        ({"implementation": "cuda"}, "accept_tree: implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "block_ids": np.zeros((2, 4), np.int32),
        "parents": np.zeros((2, 4), np.int32),
        "predicted": np.zeros((2, 4), np.int32),
        "lens": np.ones(2, np.int32),
        "max_lens": np.ones(2, np.int32),
        "stop_ids": np.ones((2, 3), np.int32),
        "frozen": np.zeros(2, bool),
    }
    with pytest.raises(ValueError, match=message):
        accept_tree(**(arguments | change))
