"""Compiles every program before serving, so that nothing compiles while requests wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_prefill_batch
from jaxspec.mode import Mode

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
_TIMED_RUNS = 3
_RUNS = 2  # the first compiles; on a GPU the second records the command buffer


def warmup(
    engine: Engine,
    *,
    modes: Sequence[Mode] = (Mode.GREEDY, Mode.SAMPLED),
    on_progress: OnProgress | None = None,
) -> None:
    """Runs every bucket of every program twice on padding rows, which change no request's row.

    modes: whose programs; those of others compile when a request first needs them.
    """
    geometry = engine.geometry
    jobs = []
    for mode in modes:
        for size in geometry.prefill_buckets:
            jobs.append((mode, "prefill", empty_prefill_batch(size, geometry)))
        if mode is Mode.PROMPT_LOGPROBS:
            continue
        for size in geometry.batch_buckets:
            packed = np.zeros((size, 1 + geometry.pages_per_slot), np.int32)
            jobs.append((mode, "decode", packed))
            if geometry.decode_steps > 1 and not mode.constrained:
                jobs.append((mode, "decode_loop", packed))
    widths = engine.pace.widths if engine.pace is not None else (geometry.block_size,)
    jobs = [
        (*job, width)
        for job in jobs
        for width in (widths if job[1] != "prefill" else (geometry.block_size,))
    ]
    for done, (mode, kind, packed, width) in enumerate(jobs):
        if on_progress is not None:
            on_progress("compiling", done, len(jobs))
        for _ in range(_RUNS):
            engine.run_idle(kind, packed, mode=mode, width=width)
        if engine.pace is not None and kind != "prefill":
            seconds = min(time_idle(engine, kind, packed, mode, width) for _ in range(_TIMED_RUNS))
            engine.pace.set_time((kind, mode, len(packed)), width, seconds)
    if on_progress is not None:
        on_progress("compiling", len(jobs), len(jobs))


def time_idle(
    engine: Engine, kind: str, packed: np.ndarray, mode: Mode, width: int | None = None
) -> float:
    """Seconds of one run of a program on padding rows; see `Engine.run_idle`."""
    before = time.perf_counter()
    engine.run_idle(kind, packed, mode=mode, width=width)
    return time.perf_counter() - before
