"""F4, F6: each row's pending token is its own, whichever rows a step leaves out."""

import jax
import numpy as np
import pytest

from jaxspec.engine.dispatch import pack_decode
from jaxspec.mode import Mode
from tests.harness import (
    SCRIPT,
    check,
    drain,
    make_engine,
    request,
    run,
    scripted_accept_lengths,
)

ASKED = [request(f"r{i}", [i * 3 + 1] * (i + 2), max_tokens=16, ignore_eos=True) for i in range(3)]


def assert_as_scripted(outputs):
    check(outputs, *ASKED)
    for asked in ASKED:
        lengths = outputs[asked.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(asked, SCRIPT)


def test_single_prefills_in_a_row_before_the_first_decode():
    """F4: padded prefills must not wrap around onto entries that wait."""
    engine = make_engine()
    for asked in ASKED:
        engine.add_request(asked)
        engine._admit()
        engine._dispatch_prefill()
    assert_as_scripted(drain(engine))


def test_a_long_prompt_in_pieces_beside_waiting_rows():
    """F4: a piece of a prompt has no token to hand over."""
    engine = make_engine()
    for asked in ASKED[:2]:
        engine.add_request(asked)
    engine.step()
    long = request("long", list(range(30)), max_tokens=2)
    outputs = run(engine, long, ASKED[2])
    check(outputs, long)
    assert_as_scripted(outputs)


def test_a_piece_of_a_prompt_writes_no_row_of_the_relay():
    """F4: only the piece in which the prompt ends does."""
    engine = make_engine()
    engine.add_request(request("long", list(range(25))))
    engine._admit()
    relay_and_limits = (engine._programs.state.future_map, engine._programs.state.limits)
    before = jax.device_get(jax.tree.map(lambda leaf: leaf[1:], relay_and_limits))
    engine._dispatch_prefill()
    relay_and_limits = (engine._programs.state.future_map, engine._programs.state.limits)
    after = jax.device_get(jax.tree.map(lambda leaf: leaf[1:], relay_and_limits))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.tolist() == new.tolist()
    drain(engine)


def rows_of_state(state, table, slot):
    """All that the state holds of a slot: its rows, and the KV in its pages."""
    pages = table[slot][table[slot] > 0]
    rows = jax.tree.map(lambda leaf: leaf[slot], (state.future_map, state.limits))
    kv = jax.tree.map(lambda leaf: leaf[pages], (state.kv, state.drafter_state))
    return jax.device_get((rows, kv))


def test_rows_outside_a_step_keep_every_bit():
    """F4: a step of slot 2 alone changes no bit of slots 1 and 3, nor of their KV."""
    engine = make_engine(overlap=False)
    for asked in ASKED:
        engine.add_request(asked)
    engine.step()
    table = engine._pages.table.copy()
    before = [rows_of_state(engine._programs.state, table, slot) for slot in (1, 2, 3)]
    plan = engine._draft_input.filter_batch({2})
    packed = pack_decode(plan, engine.geometry, table)
    state, _ = engine._programs.steps[Mode.GREEDY].decode(
        engine._programs.params, engine._programs.state, packed
    )
    after = [rows_of_state(state, table, slot) for slot in (1, 2, 3)]
    same = [
        all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
        for a, b in zip(before, after, strict=True)
    ]
    assert same == [True, False, True]


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_row_left_out_of_a_step_goes_on_where_it_was(left_out):
    """F6: no placeholder stands where its token was."""
    engine = make_engine()
    for asked in ASKED:
        engine.add_request(asked)
    may_go_on, turn, outputs = engine._may_go_on, 0, {}
    engine._may_go_on = lambda seq, length: (
        may_go_on(seq, length) and (turn % 2 == 0 or seq.slot != left_out)
    )
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        turn += 1
    assert_as_scripted(outputs)
