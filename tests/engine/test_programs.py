"""What the compiled programs promise: compiled once, donated, in place, one read a step."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from jaxspec.drafters.base import ModelParams
from jaxspec.drafters.ngram import build_ngram
from jaxspec.engine.decode_step import build_decode_step, build_stages
from jaxspec.engine.state import empty_prefill_batch, init_state
from jaxspec.engine.steps import build_steps
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.models import build_target
from tests.fakes import build_table_target
from tests.harness import (
    BLOCK,
    LOOP_STEPS,
    PAGE,
    check,
    drafter_named,
    drain,
    intercept,
    make_engine,
    make_geometry,
    record,
    request,
    run,
)
from tests.models import checkpoints
from tests.test_sampling import primitives_of

MODES = tuple(Mode)

compilations = []


def _listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


def workload(sampled):
    """Requests of many lengths and of batches of every size, finishes and admissions between."""
    asked = []
    for i in range(9):
        params = {"temperature": 0.7 * (i % 2), "seed": i} if sampled else {}
        limit = (3, 14, 1, 8)[i % 4]
        asked.append(request(f"r{i}", [i] * (1 + 3 * i), max_tokens=limit, **params))
    return asked


BUCKETS = dict(prefill_buckets=(1, 2, 4), batch_buckets=(1, 2, 4))


@pytest.mark.parametrize(
    ("drafter", "sampled", "options"),
    [("none", False, BUCKETS), ("scripted", True, {})],
    ids=["every bucket", "sampled"],
)
def test_nothing_compiles_after_warm_up(drafter, sampled, options):
    """F27 without logprobs and penalties: any batch size, admission, finish and abort."""
    engine = make_engine(drafter, **options)
    seen = []
    warmup(
        engine,
        modes=MODES[:2] if sampled else MODES[:1],
        on_progress=lambda *args: seen.append(args),
    )
    buckets = len(engine.geometry.prefill_buckets) + len(engine.geometry.batch_buckets)
    total = buckets * (2 if sampled else 1)
    compiling = [args for args in seen if args[0] == "compiling"]
    assert compiling == sorted(compiling)
    assert (compiling[0], compiling[-1]) == (("compiling", 0, total), ("compiling", total, total))
    assert seen[len(compiling) :] == [("warming up", done, total) for done in range(total + 1)]
    families = [engine._programs.steps[mode] for mode in MODES[: 2 if sampled else 1]]
    sizes = [(step.prefill._cache_size(), step.decode._cache_size()) for step in families]
    for asked in workload(sampled):  # what the oracle compiles must not count
        check(
            {asked.request_id: run(make_engine(drafter, **options), asked)[asked.request_id]}, asked
        )
    compilations.clear()
    calls = record(engine)
    asked = workload(sampled)
    for count in (1, 2, 3, 9):
        check(run(engine, *asked[:count]), *asked[:count])
    for each in asked:
        engine.add_request(each)
    for victim in ("r1", "r8", "r3"):
        engine.step()
        engine.abort(victim)
    drain(engine)
    assert compilations == []
    assert sizes == [(step.prefill._cache_size(), step.decode._cache_size()) for step in families]
    used = {(call.kind, len(call.packed)) for call in calls}
    geometry = engine.geometry
    wanted = {("prefill", size) for size in geometry.prefill_buckets}
    assert used == wanted | {("decode", size) for size in geometry.batch_buckets}


def test_the_listener_hears_a_compilation():
    compilations.clear()
    jax.jit(lambda x: x * 3 + 1)(np.arange(7, dtype=np.float32))
    assert len(compilations) == 1


def test_warm_up_changes_no_row_of_a_request():
    engine = make_engine()
    fresh = jax.device_get(init_state(engine.geometry, *models_of("scripted")).future_map)
    warmup(engine, modes=MODES[:1])
    warm = jax.device_get(engine._programs.state.future_map)
    for name in ("output_tokens", "seq_lens", "errors"):
        assert getattr(warm, name).tolist() == getattr(fresh, name).tolist()
    check(run(engine, *workload(False)), *workload(False))


def models_of(drafter, block=BLOCK):
    return build_table_target(PAGE), drafter_named(drafter, block, PAGE)


@pytest.mark.parametrize("kind", ["prefill", "decode", "split"])
def test_the_state_of_before_is_deleted_by_a_step(kind):
    """F12: whoever holds on to it gets an error, not old or foreign values."""
    engine = make_engine(split=kind == "split")
    before = jax.tree.leaves(engine._programs.state)
    if kind == "prefill":
        engine.run_idle("prefill", empty_prefill_batch(4, engine.geometry), mode=Mode.GREEDY)
    else:
        packed = np.zeros((4, 1 + engine.geometry.pages_per_slot), np.int32)
        engine.run_idle("decode", packed, mode=Mode.GREEDY)
    assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(engine._programs.params))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before[0])


class Sealed:
    """A state that the host loop cannot look into."""

    def __init__(self, state):
        self._sealed = state


class CountedOutput:
    """An output that counts how it is read."""

    def __init__(self, output, log):
        self._output, self._log = output, log

    def copy_to_host_async(self):
        self._log.append(("copy", id(self)))
        self._output.copy_to_host_async()

    def __array__(self, dtype=None, copy=None):
        self._log.append(("read", id(self)))
        return np.asarray(self._output)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_the_host_reads_one_small_output_a_dispatch_and_nothing_else(overlap):
    """Also one step late: with overlap, the next decode step is dispatched before a read."""
    engine = make_engine(overlap=overlap)
    log, outputs = [], []

    def around(kind, mode, step, params, state, packed):
        state, output = step(params, state._sealed, packed)
        outputs.append(CountedOutput(output, log))
        log.append(("dispatch", id(outputs[-1])))
        return Sealed(state), outputs[-1]

    intercept(engine, around)
    engine._programs.state = Sealed(engine._programs.state)
    asked = [request(f"r{i}", [i] * 5, max_tokens=9, ignore_eos=True) for i in range(4)]
    with jax.transfer_guard_device_to_host("disallow"):  # no effect where host memory is shared
        results = run(engine, *asked)
    check(results, *asked)
    for output in outputs:
        events = [what for what, which in log if which == id(output)]
        assert events == ["dispatch", "copy", "read"]
    dispatched_before_read = [
        sum(what == "dispatch" for what, _ in log[: log.index(("read", id(output)))]) - i - 1
        for i, output in enumerate(outputs)
    ]
    assert max(dispatched_before_read) <= 3, "a prefill and a decode step a turn at most"
    if overlap:
        assert all(ahead >= 1 for ahead in dispatched_before_read[:-1])


def compiled(step, params, state, packed):
    return step.lower(params, state, packed).compile()


def assert_in_place(program, state):
    """Every donated byte is aliased, and no buffer of a KV pool's shape is copied."""
    leaves = jax.tree.leaves(state)
    text = program.as_text()
    header = text[: text.index("\n")]
    assert len(re.findall(r"\{\d+\}: \(\d+, \{\}, (?:may|must)-alias\)", header)) >= len(leaves)
    alias_bytes = program.memory_analysis().alias_size_in_bytes
    assert alias_bytes == sum(leaf.nbytes for leaf in leaves)
    for pool in state.kv:
        shape = re.escape("[" + ",".join(map(str, pool.shape)) + "]")
        assert re.search(shape, text), "the text names no pool: the check sees nothing"
        copies = re.findall(rf"\S+ = \w+{shape}\S* copy(?:-start)?\(.*", text)
        assert not copies, copies


def decode_batch(geometry, size=4):
    return np.zeros((size, 1 + geometry.pages_per_slot), np.int32)


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_loop"])
def test_the_toy_programs_work_in_place(kind):
    """F33: no copy of the pool, and the bytes of the whole state aliased."""
    engine = make_engine(decode_steps=LOOP_STEPS)
    geometry = engine.geometry
    packed = empty_prefill_batch(4, geometry) if kind == "prefill" else decode_batch(geometry)
    step = getattr(engine._programs.steps[Mode.GREEDY], kind)
    assert_in_place(
        compiled(step, engine._programs.params, engine._programs.state, packed),
        engine._programs.state,
    )


def assert_split_in_place(geometry, target, drafter, params, state):
    verify_half, ingest_half = build_stages(geometry, target, drafter, mode=Mode.GREEDY)
    first = jax.jit(verify_half, donate_argnames="state")
    second = jax.jit(ingest_half, donate_argnames="state")
    packed = decode_batch(geometry)
    _, pending, _ = jax.eval_shape(verify_half, params, state, packed)
    assert_in_place(compiled(first, params, state, packed), state)
    assert_in_place(compiled(second, params, state, pending), state)


def test_the_split_programs_work_in_place():
    engine = make_engine()
    assert_split_in_place(
        engine.geometry, *models_of("scripted"), engine._programs.params, engine._programs.state
    )


LLAMA = dataclasses.replace(checkpoints.CONFIGS["llama"], num_layers=1)


@functools.cache
def tiny_llama():
    """A real Llama of random weights behind the n-gram drafter: (geometry, target, drafter)."""
    config = LLAMA
    geometry = make_geometry(vocab_size=config.vocab_size, decode_steps=2, num_pages=51)
    target = build_target(
        config, feature_layers=(), page_size=PAGE, dtype=jnp.dtype("float32"), kernels=Kernels()
    )
    return geometry, target, build_ngram(num_draft_tokens=BLOCK - 1, ngram_max=3, page_size=PAGE)


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_loop", "split"])
def test_the_programs_of_a_real_model_work_in_place(kind):
    geometry, target, drafter = tiny_llama()
    params = ModelParams(checkpoints.target_params(checkpoints.load("llama"), LLAMA), ())
    state = init_state(geometry, target, drafter)
    if kind == "split":
        assert_split_in_place(geometry, target, drafter, params, state)
        return
    step = getattr(build_steps(geometry, target, drafter, mode=Mode.GREEDY), kind)
    packed = empty_prefill_batch(4, geometry) if kind == "prefill" else decode_batch(geometry)
    assert_in_place(compiled(step, params, state, packed), state)


def trace(mode, on_publish=None):
    geometry = make_geometry()
    target, drafter = models_of("scripted")
    step = build_decode_step(geometry, target, drafter, mode=mode, on_publish=on_publish)
    engine = make_engine()
    return step.trace(engine._programs.params, engine._programs.state, decode_batch(geometry))


def test_a_greedy_step_draws_no_noise_and_filters_nothing():
    greedy, sampled = (primitives_of(trace(mode).jaxpr.jaxpr) for mode in MODES[:2])
    random = {"random_bits", "random_fold_in", "threefry2x32", "cond"}
    assert random & sampled, "the walk misses the noise of the sampled step"
    assert not random & greedy


def test_only_steps_that_tell_log_probabilities_sort():
    engine = make_engine()
    for mode in (Mode.SAMPLED, Mode.EDITED, Mode.LOGPROBS):
        (program,) = engine.lower_idle("decode", decode_batch(engine.geometry), mode=mode)
        sorts = re.findall(r"hlo\.\w*(?:sort|top_k)\b", program.as_text())
        assert bool(sorts) is mode.logprobs


@pytest.mark.nightly
def test_greedy_batches_run_their_own_program_whatever_was_asked_before():
    """The same text of the same program, which never sees the rows that edits need."""
    engine = make_engine()
    packed = decode_batch(engine.geometry)

    def lowered(mode):
        (program,) = engine.lower_idle("decode", packed, mode=mode)
        return program

    def of_vocabulary(program):
        counts = (engine.geometry.num_slots + 1, engine.geometry.vocab_size)
        return [aval for aval in jax.tree.leaves(program.in_avals) if aval.shape == counts]

    before = lowered(Mode.GREEDY).as_text()
    run(engine, request("a", [1, 2], frequency_penalty=1.0, logit_bias={3: 1.0}))
    assert of_vocabulary(lowered(Mode.EDITED)), "the look at the inputs sees nothing"
    assert lowered(Mode.GREEDY).as_text() == before
    assert of_vocabulary(lowered(Mode.GREEDY)) == []
    calls = record(engine)
    run(engine, request("b", [1, 2]))
    assert {call.mode for call in calls} == {Mode.GREEDY}


def test_published_lengths_are_handed_out_once_a_trace():
    seen = []
    trace(Mode.GREEDY, on_publish=seen.append)
    assert len(seen) == 1
    assert (seen[0].shape, seen[0].dtype) == ((4,), jnp.int32)


def test_published_lengths_are_those_of_the_relay():
    geometry = make_geometry()
    target, drafter = models_of("scripted")
    seen = []
    verify_half, _ = build_stages(
        geometry, target, drafter, mode=Mode.GREEDY, on_publish=seen.append
    )

    def lengths(params, state, packed):
        state, pending, _ = verify_half(params, state, packed)
        return state.future_map.seq_lens[packed[:, 0]], pending.new_seq_lens, seen[-1]

    engine = make_engine(overlap=False)
    engine.add_request(request("a", [1, 2, 3], ignore_eos=True))
    engine.step()
    packed = decode_batch(geometry)
    packed[0, 0], packed[0, 1:] = 1, engine._pages.table[1]
    relay, pending, published = jax.jit(lengths)(
        engine._programs.params, engine._programs.state, packed
    )
    assert relay[0] == pending[0] == published[0] > 4
    assert relay[1:].tolist() == [1, 1, 1]


def test_the_drafter_is_handed_rejected_places_in_the_null_page():
    """What verification hands over: committed places are the row's own, all others page 0's."""
    geometry = make_geometry()
    verify_half, _ = build_stages(geometry, *models_of("scripted"), mode=Mode.GREEDY)
    engine = make_engine(overlap=False, accepts=2)
    for i in range(2):
        engine.add_request(request(f"r{i}", [i + 1] * 3, max_tokens=4 + i, ignore_eos=True))
    engine.step()
    packed = decode_batch(geometry)
    for row in (1, 2):
        packed[row, 0], packed[row, 1:] = row, engine._pages.table[row]
    _, pending, output = jax.jit(verify_half)(
        engine._programs.params, engine._programs.state, packed
    )
    committed = pending.ingest.num_valid.tolist()
    assert committed == [0, 0, 1, 0], "row 1 has ended, row 2 ends with this token"
    pages = (pending.ingest.block.kv_locs // PAGE).tolist()
    length = int(engine._published_lens[2])
    assert pages[2][0] == engine._pages.table[2][length // PAGE] > 0
    assert pages[2][1:] == [0] * (BLOCK - 1)
    assert pages[0] == pages[1] == pages[3] == [0] * BLOCK
    assert output[:, BLOCK].tolist() == committed


def test_a_row_that_ended_on_the_device_writes_no_kv():
    """Its pages may be another's by the time that its result is known."""
    engine = make_engine(overlap=False, accepts=2)
    engine.add_request(request("a", [1, 2, 3], max_tokens=4, ignore_eos=True))
    packed = decode_batch(engine.geometry)
    calls = record(engine)
    engine.step()
    packed[:] = calls[-1].packed  # the step in which it ended, once more
    pages = packed[0, 1:][packed[0, 1:] > 0]
    before = jax.device_get([pool[pages] for pool in engine._programs.state.kv])
    state, output = engine._programs.steps[Mode.GREEDY].decode(
        engine._programs.params, engine._programs.state, packed
    )
    after = jax.device_get([pool[pages] for pool in state.kv])
    assert output[0, BLOCK:].tolist() == [0, 0, 1, 0], "frozen: nothing committed"
    for old, new in zip(before, after, strict=True):
        assert old.tolist() == new.tolist()
