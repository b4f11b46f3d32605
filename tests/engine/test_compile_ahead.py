"""Compiling side by side: calls find what was compiled, errors and Ctrl-C end it at once."""

import threading
import time

import jax
import pytest

from jaxspec.engine.compile_ahead import compile_side_by_side
from jaxspec.engine.warmup import compile_for, programs_of, warm_up_programs
from jaxspec.mode import Mode
from tests.harness import check, make_engine, request, run

TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def events():
    seen = []

    def listen(event, duration, **_):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("drafter", "modes", "num_parts"),
    [
        ("none", (Mode.GREEDY,), 2),
        pytest.param("tree", tuple(Mode), 6 + 4 + 3, marks=pytest.mark.nightly),
    ],
)
def test_calls_neither_trace_nor_compile_what_was_compiled_ahead(drafter, modes, num_parts, events):
    """A vocabulary's worth of stop ids of its own makes programs that no other test has called."""
    engine = make_engine(drafter, max_stop_ids=5)
    programs = programs_of(engine, modes)
    counts = []
    parts = [program.lower(engine) for program in programs]
    assert sum(len(each) for each in parts) == num_parts
    events.clear()
    compile_side_by_side(parts, on_compiled=counts.append)
    assert events.count(COMPILED) == num_parts
    assert counts == sorted(counts) and counts[-1] == len(programs)
    events.clear()
    for program in programs:
        program.run(engine)
    assert COMPILED not in events and TRACED not in events


@pytest.mark.parametrize("length", [3, 9], ids=["a tile", "several tiles"])
def test_a_request_alone_compiles_nothing_after_its_programs(length, events):
    sizes = dict(prefill_buckets=(1, 2, 4), batch_buckets=(1, 2, 4), max_stop_ids=5)
    engine = make_engine("none", **sizes)
    asked = request("a", list(range(length)))
    compile_for(engine, length, asked.params)
    events.clear()
    outputs = run(engine, asked)
    assert COMPILED not in events
    check(outputs, asked)


class Part:
    """Stands in for a program that compiles for as long as the test says."""

    def __init__(self, compile):
        self.compile = compile


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: out of memory"


def broken():
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


def test_the_first_error_drops_what_has_not_begun():
    begun = []

    def slow():
        begun.append("slow")
        time.sleep(0.2)

    many = [[Part(broken)], *([Part(slow)] for _ in range(60))]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_side_by_side(many)
    num_begun = len(begun)
    assert num_begun < 30
    time.sleep(0.3)
    assert len(begun) == num_begun, "it has waited for those that had begun"


def test_programs_that_do_not_fit_side_by_side_are_compiled_one_by_one(caplog):
    ran = []

    class Large:
        """A program that the device has no room to try beside others."""

        def lower(self, engine):
            return [Part(broken)]

        def run(self, engine):
            ran.append(self)

    programs = [Large(), Large()]
    warm_up_programs(None, programs)
    assert ran == [programs[0]] * 2 + [programs[1]] * 2
    assert caplog.messages == [f"compiling one program after the other ({OUT_OF_MEMORY})"]


def test_ctrl_c_does_not_wait_for_what_compiles():
    may_end = threading.Event()
    told = []

    def interrupt(count):
        told.append(count)
        if len(told) == 3:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_side_by_side([[Part(lambda: may_end.wait(30))]], on_compiled=interrupt)
    assert time.monotonic() - started < 10
    may_end.set()


def test_parts_of_a_program_are_compiled_in_order():
    order = []
    parts = [Part(lambda number=number: order.append(number)) for number in range(3)]
    compile_side_by_side([parts])
    assert order == [0, 1, 2]
