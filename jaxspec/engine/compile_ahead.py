"""Compiles programs side by side, which XLA does without holding up Python.

jax keeps what it has lowered and compiled by the types of the arguments, so that a later call of
the same jitted function neither traces nor compiles (0.10.2 and 0.11.2).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jax.stages import Lowered

from jaxspec.interrupts import COMPILING

_MAX_WORKERS = 8  # a program of a large model takes up to 1 GB of host memory meanwhile
_SHOWN_EVERY_S = 0.2


def compile_side_by_side(
    programs: Iterable[Sequence[Lowered]],
    *,
    on_compiled: Callable[[int], None] = lambda count: None,
) -> None:
    """Compiles each program as soon as it is lowered, as many at once as there are CPUs.

    programs: the parts of each, lowered as it is drawn, in the caller's thread. on_compiled: told
    now and then how many are ready. An error, or Ctrl-C, drops those that have not begun; it does
    not wait for the others.
    """
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix=COMPILING)
    waiting: set[Future[None]] = set()
    num_ready = 0
    is_over = False

    def look(timeout_s: float) -> None:
        nonlocal waiting, num_ready
        ready, waiting = wait(waiting, timeout_s)
        for each in ready:
            each.result()
        num_ready += len(ready)
        on_compiled(num_ready)

    try:
        for parts in programs:
            waiting.add(pool.submit(_compile, parts))
            look(0)
        while waiting:
            look(_SHOWN_EVERY_S)
        is_over = True
    finally:
        pool.shutdown(wait=is_over, cancel_futures=True)


def _compile(parts: Sequence[Lowered]) -> None:
    for lowered in parts:
        lowered.compile()
