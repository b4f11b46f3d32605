"""The device runs out of memory or loses a step: who is told, who goes on, what stays streamed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.engine import programs
from jaxspec.engine.device_faults import (
    REMEDY,
    DeviceFault,
    EngineFault,
    describe_fault,
    explained,
)
from jaxspec.engine.state import init_state
from jaxspec.request import FinishReason
from tests.fakes import VOCAB, PieceDetokenizer, build_table_target
from tests.harness import (
    PAGE,
    check,
    drafter_named,
    drain,
    expected,
    intercept,
    make_engine,
    request,
    run,
    tokens_of,
)

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB."
ASKED = [
    request("runs", [1, 2, 3], max_tokens=20, ignore_eos=True),
    request("second", [4, 5], max_tokens=16, ignore_eos=True, temperature=0.8, seed=3),
    request("third", [9] * 5, max_tokens=12, ignore_eos=True),
    request("waits", [4, 4, 8, 1], ignore_eos=True),
]


class Faulty:
    """Fails at the calls whose numbers are given, before the program runs or after it."""

    def __init__(self, engine, kind, at, *, keeps_state, message=OUT_OF_MEMORY):
        self.count, self.kind, self.at, self.message = 0, kind, at, message
        self.keeps_state = keeps_state
        intercept(engine, self.call)

    def call(self, kind, mode, step, params, state, packed):
        self.count += kind == self.kind
        fails = kind == self.kind and self.count in self.at
        if fails and self.keeps_state:
            raise jax.errors.JaxRuntimeError(self.message)
        result = step(params, state, packed)  # which takes the state
        if fails:
            raise jax.errors.JaxRuntimeError(self.message)
        return result


def engine_with_spare(**options):
    """An engine that can build a state anew."""
    engine = make_engine(**options)
    target, drafter = build_table_target(PAGE), drafter_named("scripted")
    engine._make_state = lambda: init_state(engine.geometry, target, drafter)
    return engine


def serve(engine, asked):
    """All outputs, each checked to go on from what was streamed before."""
    for each in asked:
        engine.add_request(each)
    seen, outputs = {}, {}
    while engine.has_unfinished:
        for output in engine.step():
            name, tokens = output.request_id, tokens_of(output)
            assert tokens[: len(seen.get(name, []))] == seen.get(name, []), "taken back"
            seen[name], outputs[name] = tokens, output
    return outputs


def assert_failed(output, asked, message):
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert output.error == message
    assert tokens_of(output) == list(expected(asked))[: len(tokens_of(output))]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_a_decode_step_without_memory_ends_its_requests_alone(overlap):
    engine = make_engine(overlap=overlap)
    Faulty(engine, "decode", {2}, keeps_state=True)
    outputs = serve(engine, ASKED)
    for asked in ASKED[:3]:
        message = f"the device ran out of memory in a decode of 3 requests; {REMEDY}"
        assert_failed(outputs[asked.request_id], asked, message)
    check(outputs, ASKED[3])


def test_a_prefill_without_memory_ends_its_requests_alone():
    engine = make_engine()
    engine.add_request(ASKED[0])
    engine.step()
    Faulty(engine, "prefill", {1}, keeps_state=True)
    outputs = serve(engine, ASKED[1:])
    message = f"the device ran out of memory in a prefill of 2 requests; {REMEDY}"
    for asked in ASKED[1:3]:
        assert_failed(outputs[asked.request_id], asked, message)
    check(outputs, ASKED[0], ASKED[3])


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_a_lost_state_is_built_again_and_all_texts_go_on(caplog, kind, at, overlap):
    """What ran is computed again from the text that has landed; nobody notices but by the time."""
    engine = engine_with_spare(overlap=overlap)
    faulty = Faulty(engine, kind, {at}, keeps_state=False)
    outputs = serve(engine, ASKED)
    check(outputs, *ASKED)
    if faulty.count >= at:
        assert "requests are computed again" in caplog.text
        assert engine.stats.num_preemptions >= 1
    check(run(engine, *ASKED), *ASKED)


def test_a_result_that_cannot_be_read_is_a_lost_state():
    """Errors of a step that was dispatched come out where its result is read."""
    engine = engine_with_spare()

    class Unreadable:
        shape = (4, 12)

        def copy_to_host_async(self):
            pass

        def __array__(self, dtype=None, copy=None):
            raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS.\nmore")

    calls = []

    def around(kind, mode, step, params, state, packed):
        calls.append(kind)
        state, output = step(params, state, packed)
        return state, Unreadable() if len(calls) == 3 else output

    intercept(engine, around)
    check(serve(engine, ASKED), *ASKED)


def test_a_step_that_always_fails_ends_what_runs_and_no_more():
    """Twice without a decode step between: those that ran are ended, the next ones may run."""
    engine = engine_with_spare()
    Faulty(engine, "decode", {1, 2}, keeps_state=False)
    outputs = serve(engine, ASKED)
    failed = [name for name, output in outputs.items() if output.error]
    assert failed == ["runs", "second", "third"]
    check(outputs, *[asked for asked in ASKED if asked.request_id not in failed])


def test_a_device_that_is_gone_ends_all_requests_with_its_error():
    engine = make_engine()
    engine._make_state = None
    Faulty(engine, "decode", {2}, keeps_state=False, message="INTERNAL: device lost.\nmore")
    for asked in ASKED:
        engine.add_request(asked)
    outputs = {}
    with pytest.raises(DeviceFault) as fault:
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
    message = (
        "the device failed while requests ran (INTERNAL: device lost); start again, and report it "
        "if it comes back"
    )
    assert str(fault.value) == message
    outputs |= {output.request_id: output for output in fault.value.outputs}
    for asked in ASKED:
        assert_failed(outputs[asked.request_id], asked, message)
    assert not engine.has_unfinished


@pytest.mark.parametrize("takes_state", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_other_errors_of_a_step_are_ours_and_the_engine_serves_on(
    caplog, kind, takes_state, overlap
):
    engine = engine_with_spare(overlap=overlap)
    calls = []

    def around(called, mode, step, params, state, packed):
        calls.append(called)
        result = step(params, state, packed) if takes_state or called != kind else None
        if called == kind and calls.count(kind) == 2:
            raise TypeError("a fault of the engine")
        return result or step(params, state, packed)

    intercept(engine, around)
    for asked in ASKED:
        engine.add_request(asked)
    outputs = {}
    with pytest.raises(EngineFault, match="a fault of the engine") as fault:
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
    assert isinstance(fault.value.__cause__, TypeError) and "a fault of the engine" in caplog.text
    message = "the engine failed (TypeError: a fault of the engine); please report it"
    ended = {output.request_id: output for output in fault.value.outputs}
    outputs |= ended
    assert ended
    for asked in ASKED:
        if asked.request_id in ended:
            assert_failed(outputs[asked.request_id], asked, message)
        else:
            check(outputs, asked)
    assert not engine.has_unfinished
    engine.check_idle()
    check(run(engine, *ASKED), *ASKED)


@pytest.mark.parametrize("loses", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("at", [1, 2])
def test_edits_that_cannot_be_written_end_their_request_alone(monkeypatch, loses, at):
    """Or, where the rows of all are lost with them, nobody but by the time."""
    engine = engine_with_spare()
    asked = [
        request("plain", [1, 2, 3], max_tokens=20, ignore_eos=True),
        request("first", [4, 5], max_tokens=16, ignore_eos=True, logit_bias={7: 2.0}),
        request("second", [9] * 5, max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    ]
    wanted = {name: tokens_of(output) for name, output in run(make_engine(), *asked).items()}
    real, calls = programs.build_start_edits, []

    def build(geometry):
        def write(edits, packed):
            calls.append(1)
            if len(calls) == at:
                if loses:
                    real(geometry)(edits, packed)  # which takes them
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            return real(geometry)(edits, packed)

        return write

    monkeypatch.setattr(programs, "build_start_edits", build)
    outputs = serve(engine, asked)
    failed = [] if loses else [["first"], ["second"]][at - 1]
    assert [name for name, output in outputs.items() if output.error] == failed
    for name, output in outputs.items():
        if name not in failed:
            assert tokens_of(output) == wanted[name]
    engine.check_idle()


def test_after_a_fault_of_the_device_the_next_request_tries_it_again():
    engine = engine_with_spare()
    make_state, builds = engine._make_state, []

    def refuse_once():
        builds.append(1)
        if len(builds) < 3:
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
        return make_state()

    engine._make_state = refuse_once
    Faulty(engine, "decode", {1}, keeps_state=False)
    for _ in range(2):
        engine.add_request(ASKED[0])
        with pytest.raises(DeviceFault) as fault:
            drain(engine)
        assert [output.request_id for output in fault.value.outputs] == ["runs"]
        assert not engine.has_unfinished
    check(run(engine, *ASKED), *ASKED)


def test_text_in_half_characters_is_told_once_though_the_state_is_lost():
    """A request that is computed again goes on with what its detokenizer holds back."""

    def halves():
        return {token: "é".encode()[token % 2 : token % 2 + 1] for token in range(VOCAB)}

    def serve_text(at):
        engine = engine_with_spare(make_detokenizer=lambda _: PieceDetokenizer(halves()))
        calls = []

        def around(kind, mode, step, params, state, packed):
            calls.append(kind)
            result = step(params, state, packed)
            if len(calls) == at:
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            return result

        intercept(engine, around)
        seen = {}
        for each in ASKED:
            engine.add_request(each)
        while engine.has_unfinished:
            for output in engine.step():
                text = output.outputs[0].text
                assert text.startswith(seen.get(output.request_id, "")), "taken back"
                seen[output.request_id] = text
        return seen

    whole = serve_text(0)
    for at in range(2, 9):
        assert serve_text(at) == whole


def test_memory_that_does_not_suffice_at_start_is_a_sentence():
    """A real allocation that no machine can meet."""
    with (
        pytest.raises(ConfigError, match=r"^the device ran out of memory at start; lower gpu_mem"),
        explained("at start"),
    ):
        jnp.zeros((1 << 20, 1 << 20, 1 << 8), jnp.float32)


def test_other_errors_at_start_stay_as_they_are():
    error = jax.errors.JaxRuntimeError("INTERNAL: something")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something"), explained("at start"):
        raise error
    assert describe_fault(RuntimeError(), "then") == (
        "the device failed then (RuntimeError); start again, and report it if it comes back"
    )


def test_a_drafter_with_damaged_weights_changes_no_text():
    """Its drafts are wrong; whatever they are, the target decides."""
    engine = make_engine(accepts=7)
    broken = engine._programs.params.drafter._replace(
        table=engine._programs.params.drafter.table * np.nan
    )
    engine._programs.params = engine._programs.params.replace(drafter=broken)
    asked = request("a", [3, 1], max_tokens=24, ignore_eos=True)
    output = run(engine, asked)["a"]
    check({"a": output}, asked)
    assert output.metrics.mean_accept_length < 2
    drain(engine)
