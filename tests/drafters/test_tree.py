"""Trees of drafts against plain Python: the likeliest nodes, their parents and what they see."""

from __future__ import annotations

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.registry import plan_drafter
from jaxspec.drafters.tree import (
    TreeShape,
    ancestors,
    best_first,
    block_mask,
    depths,
    grow,
    keep_best,
    num_best_first,
    plant,
    tree_shape,
)
from jaxspec.future_map import token_dtype
from tests.drafters.eagle_rig import quick_jit


def distributions(seed: int, *shape: int):
    """Log-probabilities in falling order, and distinct tokens."""
    rng = np.random.default_rng(seed)
    logits = np.sort(rng.normal(size=shape) * 2, axis=-1)[..., ::-1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = np.argsort(rng.random((*shape[:-1], 50)), axis=-1)[..., : shape[-1]]
    return log_probs.astype(np.float32), tokens


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the bonus token to each node."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(paths), "a parent stands behind its child"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def best_paths(children, count: int, bonus: int) -> set[tuple[int, ...]]:
    """The likeliest paths by a heap; children(path) gives (log-probability, token) pairs."""
    heap, kept = [(0.0, (bonus,))], set()
    while heap and len(kept) < count:
        score, path = heapq.heappop(heap)
        kept.add(path)
        for log_prob, token in children(path):
            heapq.heappush(heap, (score - float(log_prob), (*path, int(token))))
    return kept


@pytest.mark.parametrize(("num_nodes", "width"), [(2, 3), (9, 8), (17, 16), (33, 8)])
def test_a_best_first_tree_holds_the_likeliest_paths(num_nodes, width):
    log_probs, tokens = distributions(num_nodes, 3, 5, width)
    bonus = np.array([70, 71, 72])

    def tree_of(log_probs, tokens, bonus):
        return keep_best(best_first(log_probs, tokens, num_nodes), bonus, num_nodes)

    tree = quick_jit(tree_of)(log_probs, tokens, bonus)
    for row in range(3):

        def children(path, row=row):
            depth = len(path) - 1
            return zip(log_probs[row, depth], tokens[row, depth], strict=True) if depth < 5 else ()

        assert set(paths_of(tree, row)) == best_paths(children, num_nodes, bonus[row])


def grown(log_probs, tokens, bonus, num_nodes: int):
    """A tree from [B, S, k, k] numbers: behind entry i of a frontier come row i's children."""
    candidates, frontier = plant(log_probs[:, 0, 0], tokens[:, 0, 0])
    for step in range(1, log_probs.shape[1]):
        candidates, frontier, behind = grow(
            candidates, frontier, log_probs[:, step], tokens[:, step]
        )
    return keep_best(candidates, bonus, num_nodes), behind


GROWN = quick_jit(grown, static_argnames="num_nodes")


def test_a_grown_tree_expands_the_best_leaves_and_keeps_the_best_nodes():
    """EAGLE-2 with 4 passes of 3 leaves; candidates and leaves chosen anew in plain Python."""
    steps, width, num_nodes = 4, 3, 14
    log_probs, tokens = distributions(0, 2, steps, width, width)
    tree, _ = GROWN(log_probs, tokens, np.array([70, 71]), num_nodes=num_nodes)
    for row in range(2):
        leaves = [(log_probs[row, 0, 0, i], (tokens[row, 0, 0, i],)) for i in range(width)]
        every = list(leaves)
        for step in range(1, steps):
            children = [
                (score + log_probs[row, step, i, j], (*path, tokens[row, step, i, j]))
                for i, (score, path) in enumerate(leaves)
                for j in range(width)
            ]
            every += children
            leaves = sorted(children, reverse=True)[:width]
        best = sorted(every, reverse=True)[: num_nodes - 1]
        expected = {(70 + row, *(int(t) for t in path)) for _, path in best}
        assert set(paths_of(tree, row)) == {(70 + row,), *expected}


def test_one_branch_is_a_chain():
    log_probs, tokens = distributions(1, 2, 5, 1, 1)
    tree, behind = GROWN(log_probs, tokens, np.array([70, 71]), num_nodes=6)
    np.testing.assert_array_equal(tree.tokens[:, 1:], tokens[:, :, 0, 0])
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2
    assert behind.tolist() == [[0], [0]]


def test_a_certain_child_does_not_come_before_its_parent():
    """Scores are equal where a child has probability 1: the parent is the earlier one."""
    log_probs = np.array([[[-1.0, -2.0], [0, 0]], [[0.0, -9.0], [0.0, -9.0]]], np.float32)[None]
    tokens = np.array([[[5, 6], [0, 0]], [[7, 8], [9, 10]]])[None]
    tree, _ = GROWN(log_probs, tokens, np.array([4]), num_nodes=4)
    assert paths_of(tree, 0) == [(4,), (4, 5), (4, 6), (4, 5, 7)]


@quick_jit
def masked(parents):
    reach = ancestors(parents)
    return reach, block_mask(reach), depths(reach)


PARENTS = [[-1, 0, 0, 1, 1, 4, 2], [-1, 0, 1, 2, 3, 4, 5]]


def test_a_node_sees_itself_and_what_is_before_it():
    reach, mask, depth = masked(np.array(PARENTS, np.int32))
    assert mask[0, :, 0].tolist() == [
        0b0000001,
        0b0000011,
        0b0000101,
        0b0001011,
        0b0010011,
        0b0110011,
        0b1000101,
    ]
    assert depth.tolist() == [[0, 1, 1, 2, 2, 3, 2], [0, 1, 2, 3, 4, 5, 6]]
    np.testing.assert_array_equal(reach[1], np.tri(7, dtype=bool))


@pytest.mark.parametrize("num_nodes", [1, 33, 64])
def test_masks_hold_a_bit_a_node(num_nodes):
    rng = np.random.default_rng(num_nodes)
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, num_nodes))]
    _, words, _ = masked(np.array([parents], np.int32))
    assert words.shape == (1, num_nodes, -(-num_nodes // 32)) and words.dtype == jnp.uint32
    for node in range(num_nodes):
        path, expected = node, 0
        while path >= 0:
            expected |= 1 << path
            path = parents[path]
        found = functools.reduce(lambda a, b: a << 32 | b, map(int, words[0, node][::-1]))
        assert found == expected


@pytest.mark.parametrize(("num_nodes", "limit"), [(1, 4), (5, 4), (65, 4)])
def test_a_tree_that_cannot_be_is_refused(num_nodes, limit):
    candidates, _ = plant(jnp.zeros((1, 3)), jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(
        ValueError, match=f"tree of {num_nodes} nodes .* 3 candidates.*2 to {limit}"
    ):
        keep_best(candidates, jnp.zeros((1,), jnp.int32), num_nodes)


def shape(nodes, topk, depth=3):
    return tree_shape(
        EngineConfig(tree_nodes=nodes, tree_topk=topk),
        depth=depth,
        width=4,
        most_nodes=lambda width: num_best_first(nodes, depth, width),
    )


@pytest.mark.parametrize(("nodes", "topk"), [(4, 1), (9, 2), (14, 3), (60, 10)])
def test_as_many_candidates_are_found_as_are_counted(nodes, topk):
    candidates = jax.eval_shape(
        lambda *args: best_first(*args, nodes),
        jax.ShapeDtypeStruct((1, 3, topk), jnp.float32),
        jax.ShapeDtypeStruct((1, 3, topk), jnp.int32),
    )
    assert candidates.scores.shape[1] + 1 == num_best_first(nodes, 3, topk)


def test_the_shape_of_a_tree_comes_from_the_settings():
    assert shape(None, None) is None
    assert shape(20, None) == TreeShape(20, 4, 3)
    assert shape(15, 2) == TreeShape(15, 2, 3)
    assert shape(4, 1) is None, "one branch: a chain"


@pytest.mark.parametrize(
    ("nodes", "topk", "message"),
    [
        (3, 4, "tree_nodes is 3, fewer than the 4 tokens of a path; raise it, or .* to 3"),
        (16, 2, "is 16, but with 2 drafts behind a token and 3 on a path there are 15; lower it"),
        (5, 1, "is 5, but with 1 drafts behind a token and 3 on a path there are 4; lower it, or"),
    ],
)
def test_a_tree_that_does_not_suit_its_paths_is_refused(nodes, topk, message):
    with pytest.raises(ConfigError, match=message):
        shape(nodes, topk)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_drafter_of_chains_is_asked_for_no_tree(drafter):
    config = EngineConfig(drafter=drafter, tree_nodes=8)
    with pytest.raises(ConfigError, match=f"tree_nodes is 8, but the drafter {drafter} drafts ch"):
        plan_drafter(config, None, "float32")


def test_dtypes_are_kept_with_64_bit_types(x64):
    tokens = jnp.zeros((2, 3, 4), token_dtype())

    def tree_of(log_probs, tokens, bonus):
        tree = keep_best(best_first(log_probs, tokens, 6), bonus, 6)
        return tree, *masked.__wrapped__(tree.parents)[1:]

    log_probs = jnp.zeros((2, 3, 4), jnp.float32)
    tree, mask, depth = jax.eval_shape(tree_of, log_probs, tokens, tokens[:, 0, 0])
    assert (tree.tokens.dtype, tree.parents.dtype) == (token_dtype(), jnp.int32)
    assert (mask.dtype, depth.dtype) == (jnp.uint32, jnp.int32)
