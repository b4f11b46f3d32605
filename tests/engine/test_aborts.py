"""An abort ends one request at any point and touches no other."""

import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.request import FinishReason, StructuredOutputsParams
from tests.harness import (
    SCRIPT,
    check,
    check_logprobs,
    drain,
    expected,
    make_engine,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)
from tests.told import told_engine

# Three slots: one request runs at once, one has a prompt of two dispatches, one is short, and
# the last waits.
ASKED = [
    request("runs", [1, 2, 3], max_tokens=20, ignore_eos=True),
    request("long", [(i * 7) % 32 for i in range(21)], ignore_eos=True),
    request("short", [9] * 5, max_tokens=6),
    request("waits", [4, 4, 8, 1], ignore_eos=True),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("victim", ["runs", "long", "short", "waits"])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_after_any_step_ends_that_request_alone(steps, victim, overlap):
    engine = make_engine(overlap=overlap)
    for asked in ASKED:
        engine.add_request(asked)
    outputs = {}
    for _ in range(steps):
        outputs |= {output.request_id: output for output in engine.step()}
    over = victim in outputs and outputs[victim].finished
    aborted = engine.abort(victim)
    outputs |= drain(engine)
    check(
        outputs if over else {**outputs, victim: None},
        *[a for a in ASKED if a.request_id != victim],
    )
    engine.check_idle()
    if over:
        assert aborted is None
        return
    (asked,) = [asked for asked in ASKED if asked.request_id == victim]
    assert aborted.finished
    assert aborted.outputs[0].finish_reason is FinishReason.ABORT
    assert tokens_of(aborted) == list(expected(asked))[: len(tokens_of(aborted))]
    assert victim not in outputs or not outputs[victim].finished, "an abort is reported once"


def test_aborting_what_is_unknown_or_over_does_nothing():
    engine = make_engine()
    assert engine.abort("nobody") is None
    run(engine, ASKED[0])
    assert engine.abort("runs") is None


def test_a_second_abort_does_nothing():
    engine = make_engine()
    engine.add_request(ASKED[0])
    engine.step()
    assert engine.abort("runs") is not None
    assert engine.abort("runs") is None
    drain(engine)


def test_pages_come_back_at_once_and_the_slot_once_the_steps_in_flight_have_landed():
    engine = make_engine()
    engine.add_request(ASKED[0])
    engine.step()
    assert engine._in_flight, "the abort must find a step in flight"
    engine.abort("runs")
    assert engine.num_free_pages == engine._pages.pool.num_usable
    assert len(engine._free_slots) == 2
    assert engine.has_unfinished
    assert engine.step() == []
    assert not engine.has_unfinished
    assert len(engine._free_slots) == 3


def test_the_id_of_an_aborted_request_is_free_at_once():
    """The late result of the first must not land on the second."""
    engine = make_engine()
    engine.add_request(ASKED[0])
    engine.step()
    engine.abort("runs")
    again = request("runs", [7, 7], ignore_eos=True)
    check(run(engine, again), again)


def test_all_requests_aborted_leave_an_engine_that_serves():
    engine = make_engine()
    for asked in ASKED:
        engine.add_request(asked)
    engine.step()
    for asked in ASKED:
        engine.abort(asked.request_id)
    assert drain(engine) == {}
    check(run(engine, *ASKED), *ASKED)


MIXED = [
    request(
        "grammar",
        [3, 7],
        structured_outputs=StructuredOutputsParams(regex="(ab|de)+f"),
        logit_bias={5: -4.0},
        logprobs=2,
    ),
    request(
        "sampled",
        [(i * 5 + 4) % 32 for i in range(18)],
        temperature=0.9,
        seed=3,
        frequency_penalty=0.5,
        logprobs=1,
        prompt_logprobs=2,
        ignore_eos=True,
    ),
    request("greedy", [8, 1, 1], repetition_penalty=2.0, ignore_eos=True),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("victim", ["grammar", "sampled", "greedy"])
def test_an_abort_beside_a_grammar_logprobs_and_penalties_changes_none_of_them(victim, overlap):
    """After any step; the batch then runs other programs, the slot's next owner edits nothing."""
    last = request("last", [11, 2], temperature=0.8, seed=4, logprobs=0)
    for steps in range(7):
        engine = told_engine(*MIXED, last, overlap=overlap)
        for asked in [*MIXED, last]:
            engine.add_request(asked)
        outputs = {}
        for _ in range(steps):
            outputs |= {output.request_id: output for output in engine.step()}
        seq = engine._by_id.get(victim)
        aborted = engine.abort(victim)
        assert (aborted is None) == (seq is None)
        outputs |= {output.request_id: output for output in engine.step()}
        assert seq is None or not (seq.slot or seq.pages), "what was in flight has landed"
        outputs |= drain(engine)
        ended = None if aborted is None else victim
        others = [asked for asked in [*MIXED, last] if asked.request_id != ended]
        check(outputs, *others)
        for asked in others:
            check_logprobs(outputs[asked.request_id], asked)
        engine.check_idle()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("steps", range(2, 9))
def test_who_shares_pages_is_aborted_amid_pressure(steps, overlap):
    """The second begins with the first's pages and takes the rest, until it is aborted.

    What it leaves is enough for the first, which gives nothing up, and the others come in order.
    """
    engine = make_engine(overlap=overlap)
    engine._use_pool(PagePool(1 + 16))
    prompt = [(7 * i) % 32 for i in range(9)]
    asked = [
        request("0 first", prompt, max_tokens=None, ignore_eos=True),
        request("1 second", [*prompt[:8], 1], max_tokens=None, ignore_eos=True),
        request("2 third", [4, 4, 8], max_tokens=None, ignore_eos=True),
        request("3 fourth", [*prompt[:8], 2, 2], ignore_eos=True),
    ]
    for each in asked:
        engine.add_request(each)
    outputs = {}
    for _ in range(steps):
        outputs |= {output.request_id: output for output in engine.step()}
    aborted = engine.abort("1 second")
    assert steps > 4 or aborted is not None
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        waiting = [seq.request.request_id for seq in engine._waiting]
        assert waiting == sorted(waiting)
    check(outputs, *[each for each in asked if aborted is None or each is not asked[1]])
    assert outputs["0 first"].metrics.num_preemptions == 0, "the first that came"
    assert [outputs[name].num_cached_tokens for name in ("1 second", "3 fourth")] == [4, 4]
    for each in asked:
        output = outputs[each.request_id]
        if output.finished and not output.metrics.num_preemptions:
            lengths = output.metrics.accept_lengths
            assert lengths == scripted_accept_lengths(each, SCRIPT)
    engine.check_idle()
