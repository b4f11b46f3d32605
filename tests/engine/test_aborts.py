"""An abort ends one request at any point and touches no other."""

import pytest

from jaxspec.request import FinishReason
from tests.harness import (
    check,
    drain,
    expected,
    make_engine,
    request,
    run,
    tokens_of,
)

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


def test_slot_and_pages_come_back_once_the_steps_in_flight_have_landed():
    engine = make_engine()
    engine.add_request(ASKED[0])
    engine.step()
    assert engine._in_flight, "the abort must find a step in flight"
    engine.abort("runs")
    assert engine.num_free_pages < engine._pages.pool.num_usable
    assert engine.has_unfinished
    assert engine.step() == []
    assert not engine.has_unfinished
    assert engine.num_free_pages == engine._pages.pool.num_usable


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
