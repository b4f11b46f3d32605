"""F3, F5: a slot's next owner sees nothing of the last one, and disturbs no step in flight."""

import numpy as np
import pytest

from tests.harness import (
    check,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)

SCRIPT = (2, 0, 5, 1)


def test_a_slot_is_given_on_only_after_the_step_in_flight_has_landed():
    """F3: A ends in one result while the next step already runs with its row."""
    engine = make_engine(accepts=SCRIPT)
    calls = record(engine)
    a = request("a", [1, 2], max_tokens=5, ignore_eos=True)
    rest = [
        request(name, [i + 3] * 4, max_tokens=18, ignore_eos=True) for i, name in enumerate("bdc")
    ]
    for asked in (a, *rest):
        engine.add_request(asked)
    outputs, freed_at, reused_at = {}, None, None
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id] = output
        if freed_at is None and outputs.get("a") and outputs["a"].finished:
            freed_at = len(calls)
            in_flight = [call for call in calls if call.kind == "decode"][-1]
            assert 1 in in_flight.packed[:, 0], "A's row must be in the step in flight"
        if reused_at is None and any(s.request.request_id == "c" for s in engine._by_id.values()):
            slots = {s.request.request_id: s.slot for s in engine._by_id.values()}
            reused_at = len(calls) if slots["c"] == 1 else None
    assert freed_at is not None and reused_at is not None
    assert freed_at < reused_at
    check(outputs, a, *rest)
    for asked in rest:
        lengths = outputs[asked.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(asked, SCRIPT)


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_over_few_slots(seed):
    """F3: 20 schedules of 10 requests here; the state machine draws many more."""
    rng = np.random.default_rng(seed)
    accepts = rng.integers(0, 8, 5).tolist()
    engine = make_engine(accepts=accepts, overlap=bool(seed % 4))
    asked = [
        request(f"r{i}", rng.integers(0, 32, rng.integers(1, 31)).tolist(), max_tokens=int(limit))
        for i, limit in enumerate(rng.integers(1, 20, 10))
    ]
    outputs, waiting = {}, list(asked)
    while waiting or engine.has_unfinished:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                engine.add_request(waiting.pop(0))
        outputs |= {output.request_id: output for output in engine.step()}
    check(outputs, *asked)
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, accepts)


@pytest.mark.parametrize("drafter", ["scripted", "ngram"])
def test_a_short_prompt_after_a_long_request_in_the_same_slot(drafter):
    """F5: the drafter's history, KV and carry of the last owner are not the next one's."""
    long = request("long", [5, 6] * 10, max_tokens=12, ignore_eos=True)
    short = request("short", [5, 6, 5], max_tokens=12, ignore_eos=True)
    engine = make_engine(drafter)
    engine._free_slots.clear()
    engine._free_slots.append(1)  # one slot for both
    engine.check_idle = lambda: None  # two slots are kept away on purpose
    outputs = run(engine, long, short)
    alone = run(make_engine(drafter), short)["short"]
    check(outputs, long, short)
    assert outputs["short"].metrics.accept_lengths == alone.metrics.accept_lengths


def test_a_fresh_row_beside_rows_in_mid_decode():
    """F5: R2's first block starts at its own first token, whatever its slot held before."""
    engine = make_engine(accepts=7)
    run(engine, request("before", [9] * 4, max_tokens=16, ignore_eos=True))
    first = request("first", [1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.add_request(first)
    engine.step()
    second = request("second", [8], max_tokens=10, ignore_eos=True)
    outputs = run(engine, second)
    check(outputs, first, second)
    assert outputs["second"].metrics.accept_lengths == [8, 8]
    assert len(tokens_of(outputs["first"])) == 20
