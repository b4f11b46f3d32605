"""Error bits of the device reach the host one step later, with slot and meaning."""

import jax.numpy as jnp
import pytest

from jaxspec.drafters.base import ModelParams
from jaxspec.engine.device_faults import EngineFault
from jaxspec.future_map import FutureMap, RelayError, RelayPayload
from jaxspec.request import FinishReason
from tests.fakes import (
    NUM_STATES,
    PieceDetokenizer,
    ScriptedParams,
    checksum,
    letters,
    make_table,
)
from tests.harness import (
    check,
    drain,
    expected,
    make_engine,
    request,
    run,
    script_of,
    tokens_of,
)

FIRST = request("first", [1, 2, 3], max_tokens=20, ignore_eos=True)
SECOND = request("second", [7, 7], max_tokens=20, ignore_eos=True)


def change_relay(engine, change):
    """Puts `change(future_map)` in place of the relay, between two steps."""
    engine._programs.state = engine._programs.state.replace(
        future_map=change(engine._programs.state.future_map)
    )


def read(relay: FutureMap) -> FutureMap:
    """Reads slot 1 as a step would, without a stash behind it."""
    relay, _ = relay.resolve_future(jnp.asarray([1], jnp.int32), vocab_size=32, poison=True)
    return relay


def lose_length(relay: FutureMap) -> FutureMap:
    return relay.publish(jnp.asarray([1], jnp.int32), jnp.asarray([0], jnp.int32))


def lose_token(relay: FutureMap) -> FutureMap:
    tokens = jnp.asarray([-1], relay.output_tokens.dtype)
    carry = {"checksum": jnp.zeros((1, 1), jnp.int32)}
    return relay.stash(jnp.asarray([1], jnp.int32), RelayPayload(tokens, carry))


FAULTS = [
    (read, "slot 1 has error bits 4: it was resolved twice without a stash between"),
    (lose_length, "slot 1 has error bits 1: its length was not positive when it was resolved"),
    (lose_token, "slot 1 has error bits 2: its token was outside the vocabulary when it was "),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(("change", "message"), FAULTS, ids=["stale", "length", "token"])
def test_a_fault_of_the_relay_is_raised_and_ends_its_request_alone(change, message, overlap):
    engine = make_engine(overlap=overlap, accepts=0)
    for asked in (FIRST, SECOND):
        engine.add_request(asked)
    outputs = {output.request_id: output for output in engine.step()}
    change_relay(engine, change)
    with pytest.raises(RelayError, match=f"^{message}") as caught:
        for _ in range(2):  # one step later at most
            outputs |= {output.request_id: output for output in engine.step()}
    failed = {output.request_id: output for output in caught.value.outputs}["first"]
    assert failed.finished
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert failed.error.startswith(message)
    outputs |= drain(engine)
    check(outputs, SECOND)
    assert "first" not in engine._by_id
    check(run(engine, FIRST), FIRST)


def test_requests_that_end_in_the_step_of_a_fault_are_not_lost():
    """The step raises, and the error holds what it would have returned."""
    engine = make_engine(overlap=False, accepts=7)
    second = request("second", [7, 7], max_tokens=9, ignore_eos=True)
    for asked in (FIRST, second):
        engine.add_request(asked)
    engine._admit()
    engine._dispatch_prefill()
    engine._land_all()
    change_relay(engine, lose_length)
    with pytest.raises(RelayError) as caught:
        engine.step()
    outputs = {output.request_id: output for output in caught.value.outputs}
    check(outputs, second)
    assert not engine.has_unfinished
    assert outputs["first"].outputs[0].finish_reason is FinishReason.ERROR
    assert outputs["first"].error.startswith("slot 1 has error bits 1: ")


def engine_with_bad_states(*states, accepts=0, **settings):
    """An engine whose target has no finite logits at some checksum states."""
    engine = make_engine(**settings)
    table = make_table()
    bad = table.copy()
    bad[list(states)] = float("nan")
    script = jnp.asarray(script_of(accepts))
    engine._programs.params = ModelParams(
        jnp.asarray(bad), ScriptedParams(script, jnp.asarray(table))
    )
    return engine


def state_after(asked, count):
    """The target's state once `count` of the expected tokens stand behind the prompt."""
    tokens = list(asked.prompt_token_ids) + list(expected(asked))[:count]
    return checksum(tokens) * 2 % NUM_STATES


def states_of(asked):
    return {state_after(asked, count) for count in range(len(expected(asked)))}


@pytest.mark.parametrize("count", [0, 1, 4])
def test_logits_that_are_not_finite_end_their_request_alone(count):
    """From the prefill, the first step, a later one; a fault of the model raises nothing."""
    bad = state_after(FIRST, count)
    other = next(
        each
        for each in (request(f"o{i}", [i], max_tokens=8) for i in range(32))
        if bad not in states_of(each)
    )
    assert bad not in {state_after(FIRST, earlier) for earlier in range(count)}
    engine = engine_with_bad_states(bad)
    outputs = run(engine, FIRST, other)
    check(outputs, other)
    failed = outputs["first"]
    assert failed.finished
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert failed.error == (
        "slot 1 has error bits 8: the model's logits were not finite: its weights are damaged, or "
        "overflow in float16 (then use dtype float32)"
    )
    assert tokens_of(failed) == list(expected(FIRST))[:count]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("accepts", [1, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_tokens_of_a_block_before_bad_logits_are_kept(count, accepts, overlap):
    """As many as plain decoding gives, wherever the block begins."""
    engine = engine_with_bad_states(state_after(FIRST, count), accepts=accepts, overlap=overlap)
    output = run(engine, FIRST)["first"]
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert "logits were not finite" in output.error
    assert tokens_of(output) == list(expected(FIRST))[:count]
    assert output.metrics.num_accepted <= max(0, count - 1)


@pytest.mark.parametrize("limit", [5, 6, 8])
def test_an_end_behind_bad_logits_in_one_block_is_none(limit):
    """The device finds the end among tokens that came of logits that are not numbers."""
    asked = request("first", [1, 2, 3], max_tokens=limit, ignore_eos=True)
    output = run(engine_with_bad_states(state_after(FIRST, 4), accepts=7), asked)["first"]
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert tokens_of(output) == list(expected(FIRST))[:4]


@pytest.mark.parametrize("accepts", [0, 7])
def test_a_stop_string_before_bad_logits_ends_the_request_as_in_plain_decoding(accepts):
    """The logits behind it are of no use to anybody."""
    letters_ = letters()
    stop = letters_[list(expected(FIRST))[3]].decode()
    asked = request("first", [1, 2, 3], max_tokens=20, ignore_eos=True, stop=[stop])
    engine = engine_with_bad_states(
        state_after(FIRST, 4),
        accepts=accepts,
        make_detokenizer=lambda request: PieceDetokenizer(letters_),
    )
    output = run(engine, asked)["first"]
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.error is None
    assert tokens_of(output) == list(expected(FIRST))[:4]
    assert engine._pages.prefixes is not None


def test_logits_of_rejected_drafts_may_be_anything():
    asked = request("a", [3], max_tokens=6, ignore_eos=True)
    good = states_of(asked)
    engine = engine_with_bad_states(*(set(range(NUM_STATES)) - good))
    check(run(engine, asked), asked)


def test_a_released_slot_has_no_errors_of_its_last_owner():
    bad = state_after(FIRST, 2)
    engine = engine_with_bad_states(bad)
    run(engine, FIRST)
    assert int(engine._programs.state.future_map.errors[1]) == 8
    others = [request(f"o{i}", [i], max_tokens=5) for i in range(12)]
    others = [each for each in others if bad not in states_of(each)][:6]
    check(run(engine, *others), *others)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda engine: engine._pages.pool.allocate(1), "pages leak"),
        (lambda engine: engine._free_slots.popleft(), "slots leak"),
        (lambda engine: engine._pages.table.fill(1), "page table rows outlive their requests"),
        (lambda engine: engine._in_flight_rows.fill(1), "rows in flight outlive their steps"),
    ],
    ids=["pages", "slots", "table", "in flight"],
)
def test_what_leaks_is_found_when_the_engine_is_idle(break_it, message):
    engine = make_engine()
    run(engine, request("a", [1]))
    engine.check_idle()
    break_it(engine)
    with pytest.raises(EngineFault, match=rf"\(AssertionError: {message}\)"):
        engine.step()
    engine.check_idle()
