"""Compiles every program before serving, so that nothing compiles while requests wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_prefill_batch

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
_RUNS = 2  # the first compiles; on a GPU the second records the command buffer


def warmup(
    engine: Engine, *, greedy_only: bool = False, on_progress: OnProgress | None = None
) -> None:
    """Runs every bucket of every program twice on padding rows, which change no request's row.

    greedy_only: leaves out the programs for sampled batches.
    """
    geometry = engine.geometry
    families = (True,) if greedy_only else (True, False)
    jobs = []
    for greedy in families:
        for size in geometry.prefill_buckets:
            jobs.append((greedy, "prefill", empty_prefill_batch(size, geometry)))
        for size in geometry.batch_buckets:
            packed = np.zeros((size, 1 + geometry.pages_per_slot), np.int32)
            jobs.append((greedy, "decode", packed))
            if geometry.decode_steps > 1:
                jobs.append((greedy, "decode_loop", packed))
    for done, (greedy, kind, packed) in enumerate(jobs):
        if on_progress is not None:
            on_progress("compiling", done, len(jobs))
        for _ in range(_RUNS):
            engine.run_idle(kind, packed, greedy=greedy)
    if on_progress is not None:
        on_progress("compiling", len(jobs), len(jobs))
