"""Compiles every program before serving, so that nothing compiles while requests wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_prefill_batch
from jaxspec.mode import Mode

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
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
            if geometry.decode_steps > 1:
                jobs.append((mode, "decode_loop", packed))
    for done, (mode, kind, packed) in enumerate(jobs):
        if on_progress is not None:
            on_progress("compiling", done, len(jobs))
        for _ in range(_RUNS):
            engine.run_idle(kind, packed, mode=mode)
    if on_progress is not None:
        on_progress("compiling", len(jobs), len(jobs))
