"""Times one decode step: in the engine's loop, and on the device alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.bench.rig import Rig, build_engine, greedy_steps, make_requests
from jaxspec.config import ConfigError
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import Step
from jaxspec.request import Request


class StepTimes(NamedTuple):
    """Milliseconds of a decode step with and without the host.

    engine_ms: of the engine's loop, the median of some steps. device_ms: of the same program
    called in a chain, so that the device never waits. host_ms: what the host computes in a step,
    hidden or not.
    """

    engine_ms: float
    device_ms: float
    host_ms: float

    @property
    def exposed_host_ms(self) -> float:
        """Host time of a step that the device does not hide."""
        return max(0.0, self.engine_ms - self.device_ms)


class Recorder:
    """A program that remembers its last call, so that the device can go on from there alone."""

    def __init__(self, step: Step):
        self.step = step
        self.state: EngineState | None = None
        self.packed: np.ndarray | None = None

    def __call__(
        self, params: ModelParams, state: EngineState, packed: np.ndarray
    ) -> tuple[EngineState, Any]:
        """Runs the program."""
        self.state, output = self.step(params, state, packed)
        self.packed = packed
        return self.state, output


def time_steps(rig: Rig, *, num_requests: int, repeats: int = 1) -> StepTimes:
    """Times the decode steps of a full batch: the best of several rounds of each figure.

    What else the machine does only ever adds time, and the two phases of a round meet it unevenly.

    Raises:
        ConfigError: the context cannot hold that many steps.
    """
    rounds = [_time_round(rig, num_requests) for _ in range(repeats)]
    return StepTimes(*(min(values) for values in zip(*rounds, strict=True)))


def _time_round(rig: Rig, num_requests: int, num_steps: int = 24) -> StepTimes:
    """Runs in the engine first, then from its state on the device alone."""
    geometry = rig.geometry
    num_dispatches = max(2, num_steps // geometry.decode_steps)
    steps = greedy_steps(rig)
    kind = "decode" if geometry.decode_steps == 1 else "decode_loop"
    recorder = Recorder(getattr(steps, kind))
    engine = build_engine(rig, steps._replace(**{kind: recorder}))
    # As many for the engine as for the device alone, and a few to settle.
    fill_batch(rig, engine, num_requests, room_for=2 * num_dispatches + 4)
    while recorder.state is None:
        engine.step()
    engine.step()
    engine.stats.reset()
    engine_s = []
    for _ in range(num_dispatches):
        before = time.perf_counter()
        engine.step()
        engine_s.append(time.perf_counter() - before)
    device_s = _time_chain(rig, recorder, num_dispatches)
    a_step_ms = 1e3 / geometry.decode_steps
    return StepTimes(
        engine_ms=statistics.median(engine_s) * a_step_ms,
        device_ms=device_s * a_step_ms,
        host_ms=engine.stats.host_s / num_dispatches * a_step_ms,
    )


def fill_batch(
    rig: Rig,
    engine: Engine,
    num_requests: int,
    *,
    room_for: int,
    change: Callable[[Request], Request] = lambda request: request,
) -> list[int]:
    """Adds requests that go on until the context is full; returns the lengths of their prompts.

    room_for: dispatches that each of them must have room for. change: what each request becomes.

    Raises:
        ConfigError: the context is too short for that.
    """
    max_len, needed = rig.geometry.max_model_len, room_for * rig.geometry.max_commit
    requests = make_requests(rig, num_requests, max_tokens=max_len, ignore_eos=True)
    lens = [len(request.prompt_token_ids) for request in requests]
    if max(lens) + needed >= max_len:
        raise ConfigError(
            f"max_model_len is {max_len}, but timing {room_for} dispatches of "
            f"{rig.geometry.max_commit} tokens after a prompt of {max(lens)} needs more than "
            f"{max(lens) + needed}; raise it"
        )
    for request in requests:
        engine.add_request(change(request))
    return lens


def _time_chain(rig: Rig, recorder: Recorder, num_dispatches: int) -> float:
    """Seconds a dispatch of calls that feed each other, none of them waited for."""
    state, packed = jax.block_until_ready(recorder.state), recorder.packed
    assert state is not None and packed is not None, "nothing was recorded"
    before = time.perf_counter()
    for _ in range(num_dispatches):
        state, _ = recorder.step(rig.params, state, packed)
    jax.block_until_ready(state)
    return (time.perf_counter() - before) / num_dispatches
