"""Records when host and device work on each decode step of a running engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.bench.rig import Rig, build_engine, greedy_steps
from jaxspec.bench.step_times import fill_batch
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import Step
from jaxspec.pictures.device_spans import interval_of, program_intervals

_MARK = "jaxspec:"
_SETTLE = 4  # steps before the clock starts: the second of a program may record its graph


class Span(NamedTuple):
    """Something that was done for a decode step.

    what: "dispatch" (planned and handed over), "wait" and "commit" by the host, "device".
    step: counted from the first one dispatched here; the one that was on its way then is -1.
    """

    what: str
    step: int
    start_us: float
    end_us: float


class Timeline(NamedTuple):
    """The spans of some decode steps that followed each other.

    step_ms: of wall time. device_share: of it in which the device worked.
    """

    spans: tuple[Span, ...]
    step_ms: float
    device_share: float


def record_timeline(rig: Rig, *, overlap: bool, num_steps: int = 6) -> Timeline:
    """Serves built-in prompts, one in every slot, and profiles some of the decode steps.

    Raises:
        ConfigError: the context cannot hold that many steps.
        RuntimeError: the profile does not show each program.
    """
    steps = greedy_steps(rig)
    kind = "decode" if rig.geometry.decode_steps == 1 else "decode_loop"
    watch = Watch(getattr(steps, kind))
    engine = build_engine(rig, steps._replace(**{kind: watch}), overlap=overlap)
    num_requests = rig.geometry.num_slots
    fill_batch(rig, engine, num_requests, room_for=num_steps + _SETTLE + num_requests)
    return record_engine(engine, watch, num_requests=num_requests, num_steps=num_steps)


def record_engine(engine: Engine, watch: Watch, *, num_requests: int, num_steps: int) -> Timeline:
    """Profiles decode steps of an engine that has been given so many requests.

    watch: its program; the requests go on for longer than the steps to record.

    Raises:
        RuntimeError: the profile does not show each program.
    """
    _run_until_all_decode(engine, num_requests)
    for _ in range(_SETTLE):
        engine.step()
    jax.block_until_ready(watch.last)
    first = watch.num_calls
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # which would slow the host several times
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(num_steps):
                with jax.profiler.TraceAnnotation(f"{_MARK}loop"):
                    engine.step()
            jax.block_until_ready(watch.last)
        planes = [
            plane
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        ]
        timeline = read_timeline(planes, first, num_steps)
    return timeline._replace(step_ms=timeline.step_ms / engine.geometry.decode_steps)


def _run_until_all_decode(engine: Engine, num_requests: int) -> None:
    started: set[str] = set()
    while len(started) < num_requests:
        started |= {output.request_id for output in engine.step()}


def read_timeline(planes: Iterable[Any], first: int, num_steps: int) -> Timeline:
    """The spans that the marks on the host and the programs on the device make.

    first: number of the first call that the profile holds.
    """
    planes = list(planes)
    marks = sorted(
        (interval_of(event), event.name.removeprefix(_MARK))
        for plane in planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith(_MARK)
    )
    device = program_intervals(planes, num_steps)
    origin = marks[0][0].start_us
    spans = [Span("device", step, *at) for step, at in enumerate(device)]
    begin = end = origin
    for at, name in marks:
        if name == "loop":
            begin, end = at
            continue
        what, number = name.split()
        step = int(number) - first
        if what == "dispatch":
            spans.append(Span("dispatch", step, begin, at.end_us))
        else:
            spans.append(Span("wait", step, *at))
            spans.append(Span("commit", step, at.end_us, end))
    busy = sum(interval.end_us - interval.start_us for interval in device)
    wall = max(end, device[-1].end_us) - origin
    return Timeline(
        tuple(
            span._replace(start_us=span.start_us - origin, end_us=span.end_us - origin)
            for span in spans
        ),
        step_ms=wall / num_steps / 1e3,
        device_share=busy / wall,
    )


class Watch:
    """A program whose calls, and the reads of whose outputs, are marked in a profile."""

    def __init__(self, step: Step):
        self.num_calls = 0
        self.last: WatchedOutput | None = None
        self._step = step

    def __call__(
        self, params: ModelParams, state: EngineState, packed: np.ndarray
    ) -> tuple[EngineState, Any]:
        """Runs the program."""
        with jax.profiler.TraceAnnotation(f"{_MARK}dispatch {self.num_calls}"):
            state, output = self._step(params, state, packed)
        self.last = WatchedOutput(output, self.num_calls)
        self.num_calls += 1
        return state, self.last


class WatchedOutput:
    """An output of a step, as far as the engine uses one."""

    def __init__(self, output: jax.Array, number: int):
        self._output, self._number = output, number

    def copy_to_host_async(self) -> None:
        """Starts the copy."""
        self._output.copy_to_host_async()

    def block_until_ready(self) -> WatchedOutput:
        """Waits for the device."""
        self._output.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with jax.profiler.TraceAnnotation(f"{_MARK}wait {self._number}"):
            return np.asarray(self._output, dtype)
