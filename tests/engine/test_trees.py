"""Trees of drafts in the engine: the text of plain decoding, and the chain's accept lengths.

The toy target says another token for one wrong row of KV, and the drafter drafts wrongly where its
own KV, its carry or a feature of the accepted path is not what it should be.
"""

import chex
import jax
import numpy as np
import pytest

from jaxspec.mode import Mode
from jaxspec.request import FinishReason
from tests.engine.test_lossless import workload
from tests.fakes import EOS, build_tree_drafter, random_tree
from tests.harness import (
    BLOCK,
    CONTEXT,
    LOOP_STEPS,
    NODES,
    PAGE,
    SCRIPT,
    SLOTS,
    check,
    drain,
    expected,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)


@pytest.fixture(autouse=True, scope="module")
def quick_compiling():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def check_lengths(outputs, asked, accepts=SCRIPT):
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, accepts), each


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accepts", [SCRIPT, 7], ids=str)
def test_a_tree_gives_the_text_of_plain_decoding(accepts, sampled, overlap):
    """Also exactly the script's accept lengths, for which all KV and features must be right."""
    asked = workload(sampled)
    outputs = run(make_engine("tree", accepts=accepts, overlap=overlap), *asked)
    check(outputs, *asked)
    check_lengths(outputs, asked, accepts)


@pytest.mark.nightly
def test_a_tree_without_branches_equals_the_chain():
    """Which shows these very accept lengths, see `test_accept_lengths_equal_the_script`."""
    parents, _, _ = random_tree(0, BLOCK, BLOCK - 1)
    assert parents == list(range(-1, BLOCK - 1))
    asked = workload(sampled=False)
    outputs = run(make_engine(build_tree_drafter(BLOCK, BLOCK - 1, PAGE)), *asked)
    check(outputs, *asked)
    check_lengths(outputs, asked)


def test_a_request_alone_is_the_same_as_among_others():
    asked = workload(sampled=True)
    together = run(make_engine("tree"), *asked)
    for each in asked[:4]:
        alone = run(make_engine("tree"), each)[each.request_id]
        assert tokens_of(alone) == tokens_of(together[each.request_id])
        assert alone.metrics.accept_lengths == together[each.request_id].metrics.accept_lengths


@pytest.mark.nightly
def test_two_programs_a_step_give_what_one_gives():
    asked = workload(sampled=False)
    outputs = run(make_engine("tree", split=True), *asked)
    check(outputs, *asked)
    check_lengths(outputs, asked)


@pytest.mark.parametrize(
    "sampled", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["greedy", "sampled"]
)
def test_a_loop_of_steps_gives_what_single_steps_give(sampled):
    engine = make_engine("tree", decode_steps=LOOP_STEPS)
    asked = workload(sampled)[:SLOTS]
    calls = record(engine)
    outputs = run(engine, *asked)
    check(outputs, *asked)
    check_lengths(outputs, asked)
    assert "decode_loop" in {call.kind for call in calls}


@pytest.mark.parametrize("accepts", [7, 4])
def test_a_stop_id_at_each_place_of_the_path_ends_the_text_there(accepts):
    """F1 and F2 on a path: the stop id of every output position, and a limit at each length."""
    base = request("base", [3, 1, 4], max_tokens=14, ignore_eos=True)
    text = list(expected(base))
    asked = [
        request(f"stop{i}", [3, 1, 4], max_tokens=14, ignore_eos=True, stop_token_ids=[token])
        for i, token in enumerate(text)
        if token not in text[:i]
    ]
    asked += [
        request(f"limit{i}", [3, 1, 4], max_tokens=i, ignore_eos=True)
        for i in range(1, len(text) + 1)
    ]
    check(run(make_engine("tree", accepts=accepts), *asked), *asked)


def test_the_last_rows_of_the_context_hold_what_fits():
    """F8: prompts that leave no room for a tree; nothing is written over a neighbour's rows."""
    asked = [
        request(f"r{n}", [(n + j) % 32 for j in range(n)], max_tokens=None, ignore_eos=True)
        for n in range(CONTEXT - 6, CONTEXT)
    ]
    long = request("long", [9, 8, 7], max_tokens=None, ignore_eos=True)
    check(run(make_engine("tree", accepts=7), long, *asked), long, *asked)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_slots_change_hands_after_ends_and_aborts(overlap):
    """F3, F5: an aborted request's step in flight writes into nobody's rows."""
    engine = make_engine("tree", overlap=overlap)
    asked = workload(sampled=False)
    for each in asked:
        engine.add_request(each)
    outputs, aborted = {}, {}
    for step in range(4):
        outputs |= {output.request_id: output for output in engine.step()}
        running = sorted(seq.request.request_id for seq in engine._running.values())
        name = running[step % len(running)]
        aborted[name] = engine.abort(name)
    outputs |= drain(engine)
    for each in asked:
        if each.request_id not in aborted:
            check(outputs, each)
            continue
        output = aborted[each.request_id]
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert tokens_of(output) == list(expected(each))[: len(tokens_of(output))]


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.SAMPLED], ids=str)
@pytest.mark.parametrize("force_accept", [None, 2])
def test_a_step_keeps_shapes_and_dtypes_with_64_bit_types(x64, mode, force_accept):
    engine = make_engine("tree", force_accept=force_accept)
    packed = np.zeros((4, 1 + engine.geometry.pages_per_slot), np.int32)
    step = engine._programs.steps[mode].decode
    state, output = jax.eval_shape(step, engine._programs.params, engine._programs.state, packed)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, engine._programs.state)
    assert (output.shape, output.dtype) == ((4, NODES + 4), np.int32)


def test_forcing_follows_a_path_of_that_length():
    engine = make_engine("tree", accepts=0, force_accept=3)
    asked = [request(f"r{i}", [i + 1] * 4, max_tokens=17, ignore_eos=True) for i in range(3)]
    outputs = run(engine, *asked)
    for each in asked:
        assert outputs[each.request_id].metrics.accept_lengths == [4, 4, 4, 4]
        assert tokens_of(outputs[each.request_id]) != list(expected(each))


def test_the_paths_of_the_toy_trees_leave_the_front():
    """What the tests above rest on: rows that must move, and none that must not."""
    for seed in range(5):
        parents, depths, path = random_tree(seed, NODES, BLOCK - 1)
        assert len(path) == max(depths) + 1 == BLOCK
        assert path[1:] != list(range(1, BLOCK))
        assert [parents[node] for node in path] == [-1, *path[:-1]]
    assert EOS in np.concatenate([list(expected(each)) for each in workload(sampled=False)])
