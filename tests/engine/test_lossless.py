"""The text is that of plain decoding, whatever drafts, whoever is beside, however it is run."""

import jax
import pytest

from tests.harness import (
    CONTEXT,
    DISPATCH,
    PAGE,
    SCRIPT,
    check,
    expected,
    make_engine,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)

DRAFTERS = ["none", "ngram", "scripted", "random"]
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 7, DISPATCH, DISPATCH + 5, CONTEXT - 9, CONTEXT - 1]
SAMPLED = [
    dict(temperature=0.8),
    dict(temperature=0.0),
    dict(temperature=1.3, top_k=5),
    dict(temperature=0.6, top_p=0.7),
    dict(temperature=1.0, min_p=0.1),
]


def workload(sampled):
    """A request a prompt length; more than there are slots, and of different limits."""
    asked = []
    for i, length in enumerate(LENGTHS):
        prompt = [(i * 5 + j * 3 + 1) % 32 for j in range(length)]
        params = {"seed": i, **SAMPLED[i % len(SAMPLED)]} if sampled else {}
        limit = [12, None, 1, 5][i % 4]
        asked.append(request(f"r{i}", prompt, max_tokens=limit, ignore_eos=i % 3 > 0, **params))
    return asked


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_gives_the_text_of_plain_decoding(drafter, sampled, overlap):
    asked = workload(sampled)
    check(run(make_engine(drafter, overlap=overlap), *asked), *asked)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accepts", [0, 7, 3, SCRIPT, (7, 0), (1, 7, 7, 0, 0)], ids=str)
def test_accept_lengths_equal_the_script(accepts, sampled):
    """Right drafts need the drafter's own KV and its relayed carry, so this proves both."""
    asked = workload(sampled)
    outputs = run(make_engine(accepts=accepts), *asked)
    check(outputs, *asked)
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, accepts), each


def test_two_programs_a_step_give_what_one_gives():
    asked = workload(sampled=False)
    outputs = run(make_engine(split=True), *asked)
    check(outputs, *asked)
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, SCRIPT), each


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_a_request_alone_is_the_same_as_among_others(overlap):
    asked = workload(sampled=True)
    together = run(make_engine(overlap=overlap), *asked)
    for each in asked[:4]:
        alone = run(make_engine(overlap=overlap), each)[each.request_id]
        assert tokens_of(alone) == tokens_of(together[each.request_id])
        assert alone.metrics.accept_lengths == together[each.request_id].metrics.accept_lengths


def test_the_order_of_arrival_does_not_matter():
    asked = workload(sampled=True)
    check(run(make_engine(), *reversed(asked)), *asked)


def test_figures_count_what_was_emitted():
    asked = workload(sampled=False)
    engine = make_engine()
    outputs = run(engine, *asked)
    for each in asked:
        metrics = outputs[each.request_id].metrics
        assert metrics.num_committed == len(expected(each)) - 1  # the first is the prefill's
        assert metrics.num_verifies == len(metrics.accept_lengths)
        assert metrics.num_draft_tokens == 7 * metrics.num_verifies
        assert metrics.num_accepted == sum(metrics.accept_lengths) - metrics.num_verifies
        assert metrics.arrival_s <= metrics.first_token_s <= metrics.finished_s
    every = [outputs[each.request_id].metrics for each in asked]
    assert engine.stats.num_committed == sum(metrics.num_committed for metrics in every)
    assert engine.stats.num_accepted == sum(metrics.num_accepted for metrics in every)
    assert engine.stats.num_verifies == sum(engine.stats.accept_lengths)
    engine.stats.reset()
    assert (engine.stats.num_verifies, engine.stats.host_s) == (0, 0.0)
    assert engine.stats.accept_lengths == [0] * 9


def test_outputs_are_cumulative():
    engine = make_engine(accepts=2)
    asked = request("a", [1, 2, 3], ignore_eos=True)
    engine.add_request(asked)
    seen = []
    while engine.has_unfinished:
        seen += [tokens_of(output) for output in engine.step()]
    want = list(expected(asked))
    # The prefill and the step dispatched behind it land together.
    assert [len(tokens) for tokens in seen] == [1, 4, 7, 10, 12]
    assert all(tokens == want[: len(tokens)] for tokens in seen)


@pytest.mark.parametrize(
    ("drafter", "sampled"), [("scripted", False), ("none", True)], ids=["greedy", "sampled"]
)
def test_64_bit_types_change_nothing(drafter, sampled):
    asked = [each for each in workload(sampled) if sampled != each.params.greedy]
    want = {each.request_id: list(expected(each)) for each in asked}
    with jax.enable_x64(True):
        outputs = run(make_engine(drafter), *asked)
    assert {name: tokens_of(output) for name, output in outputs.items()} == want
