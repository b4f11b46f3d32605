"""Whether a shipped drafter pays on this machine: by measured step times, remembered on disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.warmup import Program, time_idle
from jaxspec.mode import Mode

_RUNS = 5  # at least
_MEASURE_S = 1.0  # what else the machine does comes in bursts: the fastest step of so long
_KEPT_S = 3 * 24 * 3600  # how long a measurement holds, which may have been made beside other work
_MARGIN = 1.05  # a draw goes to plain decoding, which has fewer parts


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


def measure_step_s(engine: Engine) -> float:
    """The fastest decode step of a while on a padding row, in seconds; compiles it first."""
    packed = np.zeros((1, 1 + engine.geometry.pages_per_slot), np.int32)
    program = Program("decode", Mode.GREEDY, packed, engine.geometry.block_size)
    program.run(engine)
    times: list[float] = []
    while len(times) < _RUNS or sum(times) < _MEASURE_S:
        times.append(time_idle(engine, program))
    return min(times)


def remembered_times(file: Path, key: str, measure: Callable[[], StepTimes]) -> StepTimes:
    """The step times that `file` holds for `key`, else measured now and kept there for some days.

    A file that cannot be read or written only costs the measurement.
    """
    known = _read(file)
    if key in known:
        *times, measured_at = known[key]
        if 0 <= time.time() - measured_at < _KEPT_S:
            return StepTimes(*times)
    fresh = measure()
    _write(file, {**known, key: [*fresh, time.time()]})
    return fresh


def _read(file: Path) -> dict[str, list[float]]:
    """Step times and when they were measured, in seconds since 1970, by key."""
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
        and len(value) == len(StepTimes._fields) + 1
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
