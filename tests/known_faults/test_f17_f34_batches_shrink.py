"""F17, F34: batches that shrink, to nothing too, with a step in flight."""

import jax
import numpy as np
import pytest

from jaxspec.engine.state import empty_prefill_batch
from jaxspec.mode import Mode
from tests.harness import (
    check,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
)


def test_all_requests_end_at_once_and_a_new_one_comes_later():
    """F17: three idle turns dispatch nothing; the next request is served as ever."""
    engine = make_engine(accepts=7)
    asked = [request(f"r{i}", [i + 1] * 3, max_tokens=9, ignore_eos=True) for i in range(3)]
    check(run(engine, *asked), *asked)
    calls = record(engine)
    for _ in range(3):
        assert engine.step() == []
    assert calls == []
    late = request("late", [4, 4], max_tokens=9)
    check(run(engine, late), late)


AT_NIGHT = [mode for mode in Mode if mode > Mode.EDITED]


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=[pytest.mark.nightly] if m in AT_NIGHT else []) for m in Mode],
    ids=str,
)
def test_steps_of_padding_alone_leave_live_rows_as_they_are(mode):
    """F17: no NaN, no row changed but the padding row, and that one keeps its token and length."""
    engine = make_engine(overlap=False)
    asked = [request(f"r{i}", [i + 1] * 3, max_tokens=14, ignore_eos=True) for i in range(3)]
    for each in asked:
        engine.add_request(each)
    engine.step()
    before = jax.device_get((engine._programs.state.future_map, engine._programs.state.limits))
    width = 1 + engine.geometry.pages_per_slot
    engine.run_idle("decode", np.zeros((4, width), np.int32), mode=mode)
    engine.run_idle("prefill", empty_prefill_batch(4, engine.geometry), mode=mode)
    after = jax.device_get((engine._programs.state.future_map, engine._programs.state.limits))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(old[1:], new[1:])
        assert np.isfinite(new.astype(np.float64)).all()
    relay = after[0]
    assert (relay.output_tokens[0], relay.seq_lens[0], relay.errors[0]) == (0, 1, 0)
    check(run(engine), *asked)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_rows_behind_one_that_ends_keep_their_own_token_and_length(overlap):
    """F34: the middle row ends with a verify in flight, then the first."""
    engine = make_engine(overlap=overlap, accepts=2)
    limits = {"first": 8, "middle": 2, "last": 20}
    asked = [
        request(name, [i * 5 + 1] * (i + 2), max_tokens=limit, ignore_eos=True)
        for i, (name, limit) in enumerate(limits.items())
    ]
    calls = record(engine)
    outputs = run(engine, *asked)
    check(outputs, *asked)
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, 2)
    rows = [call.packed[:, 0].tolist() for call in calls if call.kind == "decode"]
    assert [1, 3, 0, 0] in rows
    assert [3, 0, 0, 0] in rows
