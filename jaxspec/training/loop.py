"""The training loop: steps, measurements and checkpoints until the run is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.interrupts import held_back_interrupts
from jaxspec.training.anchors import TokenRows
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.config import TrainConfig
from jaxspec.training.loss import SlotSums
from jaxspec.training.report import Metrics, Report, ratios
from jaxspec.training.rows import PackedRows, batch_indices
from jaxspec.training.schedule import WARM_STEPS, Horizon, learning_rate_at
from jaxspec.training.spec import StepSpec
from jaxspec.training.step import (
    DrafterParams,
    Frozen,
    TrainState,
    build_train_step,
)
from jaxspec.training.walk import build_walk

_LOG_EVERY = 20  # steps between entries of the metrics file
_TIMED_FROM = 4  # the first steps compile
_IN_FLIGHT = 2  # steps dispatched before the oldest is waited for
_HELD_OUT_ROWS = {"gpu": 64}  # that are measured; elsewhere it takes too long


class Best(NamedTuple):
    """The drafter that was written out: its step, and its measurement where there is one."""

    step: int
    held_out: Metrics | None


Export = Callable[[DrafterParams, Best, float], None]  # weights, what they are, seconds used


class Tools(NamedTuple):
    """What the loop works with.

    notes: of the checkpoint, see `Checkpoints.save`. export: writes a drafter out, over the last.
    """

    spec: StepSpec
    horizon: Horizon
    report: Report
    checkpoints: Checkpoints
    frozen: Frozen
    notes: dict[str, Any]
    export: Export


def run_steps(
    config: TrainConfig,
    tools: Tools,
    state: TrainState,
    data: PackedRows,
    held_out: PackedRows | None,
    key: jax.Array,
) -> tuple[Best, float]:
    """Steps until the horizon, writing the drafter out whenever it guesses held-out text better.

    Little data is learnt by heart in the end, so the last state is not always the best one.

    Returns:
        What was written out last, and the seconds used.
    """
    train_step = build_train_step(tools.spec)
    measure = None
    if held_out is not None:
        size = min(_HELD_OUT_ROWS.get(jax.default_backend(), 8), len(held_out))
        some = held_out.take(np.arange(size))
        measure = build_walk(replace(tools.spec, micro_batches=1), tools.frozen, some)
    clock = _Clock(tools.notes["elapsed_s"])
    in_flight: deque[SlotSums] = deque()
    best = Best(**tools.notes["best"]) if tools.notes["best"] else None
    step = int(state.step)
    logged_step, logged_s = step, clock.elapsed_s

    def record(kind: str, metrics: Metrics) -> None:
        metrics = {**metrics, "elapsed_s": clock.elapsed_s}
        tools.report.add(kind, step, metrics, total=tools.horizon.total_steps)

    def keep_if_better() -> None:
        nonlocal best
        served, metrics = state.served, None
        if measure is not None:
            metrics = measure(served)
            record("held-out", metrics)
        if best is None or best.held_out is None or _length(metrics) > _length(best.held_out):
            best = Best(step, metrics)
            tools.export(served, best, clock.elapsed_s)

    def save() -> None:
        more = {"elapsed_s": clock.elapsed_s, "total_steps": tools.horizon.total_steps}
        tools.checkpoints.save(state, {**tools.notes, **more, "best": best and best._asdict()})

    try:
        while not tools.horizon.is_over(done=step, elapsed_s=clock.elapsed_s):
            wanted = batch_indices(step, config.batch_rows, len(data), seed=config.seed)
            rows = TokenRows.from_host(data.take(wanted))
            rate = learning_rate_at(
                step, tools.horizon.steps, peak=config.learning_rate, warmup=config.warmup
            )
            with held_back_interrupts():  # the step donates the state
                state, sums = train_step(state, tools.frozen, rows, key, np.float32(rate))
            step += 1
            in_flight.append(sums)
            if len(in_flight) > _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            _fit_horizon(tools.horizon, step, clock, sums)
            if step % _LOG_EVERY == 0:
                speed = (step - logged_step) / (clock.elapsed_s - logged_s)
                logged_step, logged_s = step, clock.elapsed_s
                record("train", {**ratios(sums), "learning_rate": rate, "steps_per_s": speed})
            over = tools.horizon.is_over(done=step, elapsed_s=clock.elapsed_s)
            if step % config.measure_every == 0 and measure is not None and not over:
                keep_if_better()
            if clock.since_mark_s > 60 * config.save_minutes:
                save()
                clock.mark()
    except (KeyboardInterrupt, SystemExit):  # SIGTERM raises the latter
        save()
        tools.report.say(f"interrupted at step {step}; go on with --resume")
        raise
    keep_if_better()
    save()
    return best, clock.elapsed_s


def _length(metrics: Metrics) -> float:
    return metrics["simulated_accept_length"]


class _Clock:
    """Wall time of the run, earlier sittings included, and since a mark."""

    def __init__(self, before_s: float):
        self._started_s = time.monotonic() - before_s
        self.mark()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def since_mark_s(self) -> float:
        return time.monotonic() - self._marked_s

    def mark(self) -> None:
        self._marked_s = time.monotonic()


def _fit_horizon(horizon: Horizon, step: int, clock: _Clock, sums: SlotSums) -> None:
    """Times the steps after compilation, and decides how many more there are time for."""
    if not horizon.is_open or step not in (_TIMED_FROM, WARM_STEPS):
        return
    jax.block_until_ready(sums)
    if step == WARM_STEPS:
        seconds = clock.since_mark_s / (WARM_STEPS - _TIMED_FROM)
        horizon.fit(done=step, elapsed_s=clock.elapsed_s, seconds_a_step=seconds)
    clock.mark()
