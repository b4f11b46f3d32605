"""Whether a shipped drafter pays on this machine: by measured step times, remembered on disk.

What was measured beside other work, or on a machine that has changed, shows in the steps of later
sessions: they are held against those of the first session after the measurement.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_decode_batch
from jaxspec.engine.warmup import Program, time_idle, warm_up_programs
from jaxspec.mode import Mode

_RUNS = 5  # at least
_MEASURE_S = 2.0  # what else the machine does comes in bursts: the fastest steps of so long
_KEPT_S = 3 * 24 * 3600  # how long a measurement holds, which may have been made beside other work
_MARGIN = 1.05  # a draw goes to plain decoding, which has fewer parts
_NUM_MEASURED = 3  # numbers kept of a measurement; a fourth is the first session's step time
_WATCHED = 64  # steps that a session is judged by
_CHANGED = 1.3  # times as long as before, or as short: the machine is not the one that was measured


class StepTimes(NamedTuple):
    """Seconds of a decode step at batch 1: plain, and with the drafter."""

    plain_s: float
    draft_s: float


class Verdict(NamedTuple):
    """Whether to draft, and the sentence that says why."""

    pays: bool
    reason: str


def judge(times: StepTimes, accept_length: float) -> Verdict:
    """Drafting pays where a step brings more tokens than it costs plain steps."""
    speedup = accept_length * times.plain_s / times.draft_s
    pays = speedup >= _MARGIN
    return Verdict(
        pays,
        f"auto: {accept_length:.2f} tokens a step of {times.draft_s * 1e3:.2f} ms, plain "
        f"{times.plain_s * 1e3:.2f} ms, so {speedup:.2f}x plain decoding",
    )


def measure_steps(engine: Engine) -> StepTimes:
    """The fastest decode steps of a while on a padding row, plain and drafted in turns.

    engine: of the drafter, with a pace, so that it can step without: what a plain step ingests is
    a hundredth of it.
    """
    packed = empty_decode_batch(1, engine.geometry)
    widths = (1, engine.geometry.block_size)
    programs = [Program("decode", Mode.GREEDY, packed, width) for width in widths]
    warm_up_programs(engine, programs)
    rounds: list[list[float]] = []
    until = time.perf_counter() + _MEASURE_S
    while len(rounds) < _RUNS or time.perf_counter() < until:
        rounds.append([time_idle(engine, program) for program in programs])
    return StepTimes(*map(min, zip(*rounds, strict=True)))


def remembered_times(file: Path, key: str, measure: Callable[[], StepTimes]) -> StepTimes:
    """The step times that `file` holds for `key`, else measured now and kept there for some days.

    A file that cannot be read or written only costs the measurement.
    """
    known = _read(file)
    if key in known:
        plain_s, draft_s, measured_at, *_ = known[key]
        if 0 <= time.time() - measured_at < _KEPT_S:
            return StepTimes(plain_s, draft_s)
    fresh = measure()
    _write(file, {**known, key: [*fresh, time.time()]})
    return fresh


class StepWatch:
    """Holds a session's steps against those of the first one after a measurement.

    Where they differ, what is remembered is forgotten, and the next start measures again.

    file, key: as of `remembered_times`.
    """

    def __init__(self, file: Path, key: str):
        self._file, self._key = file, key
        self._steps_s: list[float] = []

    def __call__(self, batch: Hashable, seconds: float) -> None:
        """Takes note of a step that verified all drafts."""
        if batch != ("decode", Mode.GREEDY, 1) or len(self._steps_s) == _WATCHED:
            return
        self._steps_s.append(seconds)
        if len(self._steps_s) == _WATCHED:
            self._compare(statistics.median(self._steps_s))

    def _compare(self, step_s: float) -> None:
        known = _read(self._file)
        if self._key not in known:
            return
        *measured, last = known[self._key]
        if len(measured) < _NUM_MEASURED:
            known[self._key] = [*measured, last, step_s]
        elif not 1 / _CHANGED < step_s / last < _CHANGED:
            del known[self._key]
        else:
            return
        _write(self._file, known)


def _read(file: Path) -> dict[str, list[float]]:
    """By key: step times, when they were measured, in seconds since 1970, and a session's step."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        key: value
        for key, value in known.items()
        if isinstance(value, list)
        and len(value) in (_NUM_MEASURED, _NUM_MEASURED + 1)
        and all(isinstance(number, float) and number > 0 for number in value)
    }


def _write(file: Path, known: dict[str, list[float]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(known, out, indent=1)
        os.replace(name, file)
    except OSError:
        return
