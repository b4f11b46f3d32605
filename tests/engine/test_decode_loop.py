"""k steps in one program are k single steps."""

import chex
import jax
import numpy as np
import pytest

from jaxspec.engine.dispatch import pack_decode
from jaxspec.mode import Mode
from tests.fakes import PieceDetokenizer, letters
from tests.harness import (
    LOOP_STEPS,
    SCRIPT,
    check,
    drain,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)

LOOP = dict(decode_steps=LOOP_STEPS)


def engine_after_prefill(asked):
    """An engine whose requests have their first token and pages for a loop, nothing in flight."""
    engine = make_engine(**LOOP, overlap=False)
    for each in asked:
        engine.add_request(each)
    engine._admit()
    engine._dispatch_prefill()
    engine._land_all()
    plan = engine._draft_input
    for slot in plan.rows.tolist():
        seq = engine._running[slot]
        engine._pages.reserve(seq, seq.prefill_len + engine.geometry.max_commit)
    return engine, pack_decode(plan, engine.geometry, engine._pages.table)


def run_both_ways(limits):
    """(packed batch, state and output of a loop, state and outputs of as many single steps)."""
    asked = [
        request(f"r{i}", [i + 1] * (i + 2), max_tokens=limit, ignore_eos=True)
        for i, limit in enumerate(limits)
    ]
    loop, packed = engine_after_prefill(asked)
    single, same = engine_after_prefill(asked)
    assert packed.tolist() == same.tolist()
    loop_state, loop_output = loop._programs.steps[Mode.GREEDY].decode_loop(
        loop._programs.params, loop._programs.state, packed
    )
    state, outputs = single._programs.state, []
    for _ in range(LOOP_STEPS):
        state, output = single._programs.steps[Mode.GREEDY].decode(
            single._programs.params, state, packed
        )
        outputs.append(np.asarray(output))
    return packed, (loop_state, np.asarray(loop_output)), (state, np.stack(outputs))


@pytest.mark.parametrize("limits", [(20, 20, 20), (20, 5, 2)], ids=str)
def test_the_loop_equals_single_steps_bit_for_bit(limits):
    """Also where rows end inside the loop."""
    _, (loop_state, loop_output), (state, outputs) = run_both_ways(limits)
    assert outputs[-1, :, -4].any(), "some row must live to the last step"
    assert loop_output.tolist() == outputs.tolist()
    chex.assert_trees_all_equal(jax.device_get(loop_state), jax.device_get(state))


def test_a_loop_whose_rows_have_all_ended_stops_early():
    packed, (loop_state, loop_output), (state, outputs) = run_both_ways((2, 6, 3))
    assert loop_output[..., :-4].tolist() == outputs[..., :-4].tolist()
    assert loop_output[..., -4].tolist() == outputs[..., -4].tolist()
    assert not loop_output[-1].any(), "steps that did not run report nothing"
    assert outputs[-1, :, -2].all(), "single steps go on reporting that the rows have ended"
    rows = packed[:, 0]
    for name in ("output_tokens", "seq_lens", "errors"):
        ran, want = (getattr(each.future_map, name)[rows] for each in (loop_state, state))
        assert ran.tolist() == want.tolist()


TURNS = [
    pytest.param({"decode_steps": LOOP_STEPS, "loop_unroll": LOOP_STEPS}, id="one turn"),
    pytest.param(  # its own page table, and so programs of its own
        {"decode_steps": 4, "loop_unroll": 2, "pages_per_slot": 25, "num_pages": 76},
        id="two turns",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize("turns", TURNS)
def test_unrolled_loops_give_the_text_of_plain_decoding(turns):
    """Rows end in every step of a turn, and loops before their second turn."""
    engine = make_engine(**turns)
    calls = record(engine)
    outputs = run(engine, *WORKLOAD)
    check(outputs, *WORKLOAD)
    for each in WORKLOAD:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, SCRIPT)
    assert "decode_loop" in {call.kind for call in calls}


WORKLOAD = [
    request(f"r{i}", [(i * 5 + j) % 32 for j in range(length)], max_tokens=limit, ignore_eos=i > 1)
    for i, (length, limit) in enumerate([(1, 12), (5, None), (17, 9), (30, None), (3, 1), (8, 20)])
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_looping_gives_the_text_of_plain_decoding(overlap):
    engine = make_engine(**LOOP, overlap=overlap)
    calls = record(engine)
    outputs = run(engine, *WORKLOAD)
    check(outputs, *WORKLOAD)
    for each in WORKLOAD:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, SCRIPT)
    assert {call.kind for call in calls} == {"prefill", "decode", "decode_loop"}


def test_looping_gives_the_sampled_text_of_plain_decoding():
    asked = [
        request(f"s{i}", [i, i + 3], temperature=0.9, seed=i, top_k=6, max_tokens=14)
        for i in range(3)
    ]
    engine = make_engine("none", **LOOP)
    calls = record(engine)
    check(run(engine, *asked), *asked)
    assert {call.kind for call in calls} == {"prefill", "decode_loop"}


def test_single_steps_run_while_requests_wait():
    engine = make_engine(**LOOP)
    calls = record(engine)
    asked = [request(f"r{i}", [i + 1] * 3, ignore_eos=True) for i in range(5)]
    for each in asked:
        engine.add_request(each)
    outputs, waited = {}, set()
    while engine.has_unfinished:
        before = len(calls)
        outputs |= {output.request_id: output for output in engine.step()}
        waited |= {call.kind for call in calls[before:]} if engine._waiting else set()
    check(outputs, *asked)
    assert waited == {"prefill", "decode"}
    assert "decode_loop" in {call.kind for call in calls}


def test_a_row_with_stop_strings_runs_single_steps():
    engine = make_engine(**LOOP, make_detokenizer=lambda _: PieceDetokenizer(letters()))
    calls = record(engine)
    asked = request("a", [1, 2], stop="never", ignore_eos=True)
    check(run(engine, asked), asked)
    assert {call.kind for call in calls} == {"prefill", "decode"}


@pytest.mark.parametrize("steps", range(1, 4))
def test_an_abort_with_a_loop_in_flight_touches_no_other(steps):
    engine = make_engine(**LOOP, accepts=0)
    asked = [request(f"r{i}", [i + 1] * 4, max_tokens=20, ignore_eos=True) for i in range(3)]
    for each in asked:
        engine.add_request(each)
    for _ in range(steps):
        engine.step()
    aborted = engine.abort("r1")
    outputs = drain(engine)
    check(outputs, asked[0], asked[2])
    assert len(tokens_of(aborted)) < 20
