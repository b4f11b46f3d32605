"""F11, F12: host arrays handed over are never touched again; no two leaves share a buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine import dispatch
from jaxspec.engine.dispatch import pack_decode
from jaxspec.engine.state import empty_prefill_batch
from jaxspec.mode import Mode
from tests.harness import check, intercept, make_engine, record, request, run

ASKED = [request(f"r{i}", [i + 1] * (3 * i + 1), max_tokens=14, ignore_eos=True) for i in range(5)]


def test_no_array_handed_to_a_step_is_part_of_the_hosts_tables():
    """F11: on CPU jax may go on reading the numpy buffer itself."""
    engine = make_engine()
    calls = record(engine)
    check(run(engine, *ASKED), *ASKED)
    mine = (engine._pages.table, engine._published_lens, engine._in_flight_rows)
    packed = [call.packed for call in calls]
    assert not any(np.shares_memory(array, table) for array in packed for table in mine)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(packed) for b in packed[:i]), (
        "an array is filled a second time"
    )


def test_what_was_handed_over_is_not_edited_afterwards(monkeypatch):
    """F11: frozen arrays would refuse an edit. On a CPU the device's array is the host's."""
    engine = make_engine()
    frozen = []

    def pack(*args):
        packed = pack_decode(*args)
        packed.flags.writeable = False
        frozen.append(packed)
        return packed

    def around(kind, mode, step, params, state, packed):
        if kind == "prefill":
            packed.flags.writeable = False
        return step(params, state, packed)

    monkeypatch.setattr(dispatch, "pack_decode", pack)
    intercept(engine, around)
    check(run(engine, *ASKED), *ASKED)
    assert frozen


def test_the_page_table_may_change_right_after_a_dispatch():
    """F11: the result equals that of a run with a forced copy of every input."""
    engine = make_engine()

    def around(kind, mode, step, params, state, packed):
        result = step(params, state, packed)
        kept = engine._pages.table.copy()
        engine._pages.table[:] = 99
        jax.block_until_ready(result[1])
        engine._pages.table[:] = kept
        return result

    intercept(engine, around)
    copied = make_engine()
    intercept(
        copied,
        lambda kind, mode, step, params, state, packed: step(
            params, state, jnp.array(packed, copy=True)
        ),
    )
    check(run(engine, *ASKED), *ASKED)
    check(run(copied, *ASKED), *ASKED)


def test_one_buffer_in_two_leaves_cannot_be_donated():
    """F12: jax refuses it; `test_state.py` shows that no state is built like this."""
    engine = make_engine()
    relay = engine._programs.state.future_map
    engine._programs.state = engine._programs.state.replace(
        future_map=relay.replace(errors=relay.seq_lens)
    )
    with pytest.raises(Exception, match="donate the same buffer twice"):
        engine.run_idle("prefill", empty_prefill_batch(4, engine.geometry), mode=Mode.GREEDY)


def test_a_result_in_flight_is_no_part_of_the_state():
    """F12: it must stay readable after the next step has taken the state."""
    engine = make_engine()
    outputs = []

    def around(kind, mode, step, params, state, packed):
        state, output = step(params, state, packed)
        outputs.append(output)
        return state, output

    intercept(engine, around)
    check(run(engine, *ASKED), *ASKED)
    assert not any(output.is_deleted() for output in outputs)
