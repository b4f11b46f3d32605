"""EAGLE-2's trees: against recomputation from scratch, and inside the engine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.eagle import build_eagle
from jaxspec.drafters.eagle_tree import eagle_tree_shape
from jaxspec.drafters.registry import plan_drafter
from jaxspec.drafters.tree import TreeShape
from jaxspec.mode import Mode
from jaxspec.models.base import Kernels
from tests.drafters.dense_eagle import DenseEagle
from tests.drafters.eagle_folders import config_of, loaded, save, target_of, tensors_of
from tests.drafters.eagle_rig import BORROWED, PAGE_SIZE, Run
from tests.drafters.test_eagle import feature_width, params_of
from tests.drafters.test_eagle_engine import (
    BLOCK,
    GREEDY_AND_SAMPLED,
    TABLE_EAGLE,
    engine_of,
    knowing_eagle,
    successors,
    table_eagle,
    table_engine,
    workload,
)
from tests.drafters.test_tree import paths_of
from tests.fakes import checksum
from tests.harness import check, run, tokens_of

DEPTH = BLOCK - 1
TREE = TreeShape(num_nodes=12, width=3, depth=DEPTH)
WHOLE = TreeShape(num_nodes=22, width=3, depth=DEPTH)  # all that its passes find
ONE_BRANCH = TreeShape(num_nodes=BLOCK, width=1, depth=DEPTH)


@pytest.fixture(autouse=True, scope="module")
def quick_compiling():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class TreeRun(Run):
    """A run whose drafts are kept as trees."""

    def draft(self):
        kept = self.greedy

        def greedy(*args):
            self.tree, state = kept(*args)
            return self.tree, state

        self.greedy = greedy
        tokens = super().draft()
        self.greedy = kept
        return tokens


@functools.cache
def build(case: str, tree: TreeShape | None):
    return build_eagle(
        loaded(case)[0],
        BORROWED,
        block_size=BLOCK,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        kernels=Kernels(),
        tree=tree,
    )


def likeliest(dense: DenseEagle, output, width: int) -> list[tuple[float, int]]:
    logits = dense.logits(output)
    log_probs = logits - np.log(np.exp(logits).sum())
    ids = dense.params.target_ids
    best = np.argsort(-log_probs)[:width]
    return [(log_probs[i], int(i if ids is None else ids[i])) for i in best]


def dense_tree(dense: DenseEagle, features, next_ids, tree: TreeShape) -> set[tuple[int, ...]]:
    """The paths of EAGLE-2's tree behind the bonus token, each leaf computed from scratch."""

    def children(path):
        outputs = dense.chain(features, next_ids, len(path) + 1, forced=path)[1]
        return likeliest(dense, outputs[-1], tree.width)

    leaves = [(score, (token,)) for score, token in children(())]
    every = list(leaves)
    for _ in range(tree.depth - 1):
        grown = [
            (score + own, (*path, token)) for score, path in leaves for own, token in children(path)
        ]
        every += grown
        leaves = sorted(grown, reverse=True)[: tree.width]
    return {path for _, path in sorted(every, reverse=True)[: tree.num_nodes - 1]}


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        ("plain", WHOLE),
        pytest.param("plain", TREE, marks=pytest.mark.nightly),
        pytest.param("eagle", WHOLE, marks=pytest.mark.nightly),
    ],
    ids=["eagle3, own vocabulary", "the best nodes of it", "eagle"],
)
def test_every_tree_of_a_run_equals_recomputation_from_scratch(case, tree):
    """Rows accept 0 to 3 drafts in one step; what was rejected is NaN; page size 4."""
    run = TreeRun(build(case, tree), params_of(case), feature_width(case))
    dense = DenseEagle(*loaded(case), *params_of(case).target)
    for counts in [(3, 4, 1), (1, 2, 4), (4, 1, 2)]:
        run.commit(*counts)
        run.draft()
        for row in range(3):
            known = run.texts[row].known(run.lens[row])
            bonus = int(run.texts[row].ids[run.lens[row]])
            paths = {path[1:] for path in paths_of(run.tree, row)} - {()}
            assert paths == dense_tree(dense, *known, tree)
            assert run.tree.tokens[row, 0] == bonus


@pytest.mark.nightly
def test_a_tree_of_one_branch_drafts_the_chain():
    runs = [
        TreeRun(build("plain", tree), params_of("plain"), feature_width("plain"))
        for tree in (ONE_BRANCH, None)
    ]
    for counts in [(3, 4, 1), (1, 2, 4)]:
        for each in runs:
            each.commit(*counts)
        tree, chain = (each.draft() for each in runs)
        np.testing.assert_array_equal(tree, chain)
        assert runs[0].tree.parents.tolist() == [[-1, 0, 1, 2]] * 3


@pytest.mark.nightly
def test_a_tree_of_one_branch_is_served_as_the_chain():
    """The same texts by the same accept lengths, sampled too."""
    asked = workload(GREEDY_AND_SAMPLED)
    tree, chain = (run(table_engine(shape), *asked) for shape in (ONE_BRANCH, None))
    for each in asked:
        lengths = [outputs[each.request_id].metrics.accept_lengths for outputs in (tree, chain)]
        assert lengths[0] == lengths[1]
    check(tree, *asked)


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        pytest.param([{}], False, marks=pytest.mark.nightly),
        (GREEDY_AND_SAMPLED, True),
    ],
    ids=["greedy", "mixed, overlapped"],
)
def test_the_text_is_that_of_plain_decoding(settings, overlap):
    """Exact, on the table target: slots reused, prompts in chunks, batches mixed."""
    asked = workload(settings)
    engine = table_engine(TREE, overlap=overlap)
    check(run(engine, *asked), *asked)
    assert engine.stats.num_accepted > 0, "not one draft was right, so no path was followed"


@pytest.mark.nightly
def test_what_is_relayed_equals_recomputation_from_the_text():
    """Two drafts a step are forced to count; the carry holds the k first drafts."""
    engine, dense = table_engine(TREE, overlap=False, force_accept=2), table_eagle(TREE)[1]
    dense = DenseEagle(TABLE_EAGLE, dense)
    for each in workload([{}]):
        engine.add_request(each)
    checked = 0
    while engine.has_unfinished:
        engine.step()
        relay = jax.device_get(engine._programs.state.future_map)
        for slot, seq in engine._running.items():
            tokens = [*seq.request.prompt_token_ids, *seq.output_ids]
            features = [[t, p, 2 * checksum(tokens[: p + 1])] for p, t in enumerate(tokens[:-1])]
            _, (output,) = dense.chain(np.array(features, np.float64), tokens[1:], 1)
            first = likeliest(dense, output, TREE.width)
            assert relay.seq_lens[slot] == len(tokens) - 1
            assert relay.carry.topk_index[slot].tolist() == [token for _, token in first]
            np.testing.assert_allclose(
                np.log(relay.carry.topk_p[slot]), [score for score, _ in first], atol=1e-3
            )
            checked += 1
    assert checked > 15


@pytest.mark.nightly
def test_a_drafter_that_knows_the_target_is_always_right_at_any_temperature():
    """Drafts are the likeliest with the noise that the target draws with, at the same positions."""
    engine = engine_of(*knowing_eagle(WHOLE), families=(Mode.SAMPLED,) * 2)
    asked = workload(GREEDY_AND_SAMPLED)
    outputs = run(engine, *asked)
    for each in asked:
        output = outputs[each.request_id]
        assert set(output.metrics.accept_lengths) <= {BLOCK}
        if each.params.greedy:
            assert tokens_of(output) == successors(each)
    assert engine.stats.num_accepted == DEPTH * engine.stats.num_verifies > 0


def shape(nodes, topk=None, *, block_size=6, **settings):
    config = EngineConfig(tree_nodes=nodes, tree_topk=topk, **settings)
    return eagle_tree_shape(config, TABLE_EAGLE, block_size)


def test_the_width_of_a_tree_suits_its_nodes_where_it_is_open():
    assert [shape(nodes).width for nodes in (16, 32, 64)] == [4, 8, 8]
    assert shape(8, block_size=2).width == 8
    assert shape(6, 1) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(nodes=16, topk=5), "tree_topk 5 over 5 drafts a path takes 20 rows .* tree_nodes 16"),
        (dict(nodes=64, topk=21), "is 21, but the drafter's vocabulary has 20 tokens; lower it"),
        (dict(nodes=64, topk=3), "is 64, but with 3 drafts behind .* there are 40; lower it"),
        (dict(nodes=5), "is 5, fewer than the 6 tokens of a path; raise it, or lower block_size"),
        (dict(nodes=16, draft_window=9), "is 16, but the drafter looks back over 9 positions, and"),
    ],
)
def test_a_tree_that_the_drafter_cannot_make_is_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        shape(**asked)


def test_a_checkpoint_is_served_with_the_tree_of_the_settings(tmp_path):
    save(tmp_path, config_of("plain"), tensors_of("plain"))
    config = EngineConfig(drafter=str(tmp_path), tree_nodes=9, tree_topk=3, block_size=4)
    name, plan = plan_drafter(config, target_of("plain"), "float32")
    assert (name, plan.block_size, plan.tree_depth) == ("eagle3", 9, 3)
    drafter = plan.build(BORROWED, 4, Kernels())
    assert (drafter.block_size, drafter.depth, drafter.max_accept_length) == (9, 3, 4)
