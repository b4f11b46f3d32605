"""Compiles programs side by side, which XLA does without holding up Python.

jax keeps what it has lowered and compiled by the types of the arguments, so that a later call of
the same jitted function neither traces nor compiles (0.10.2 and 0.11.2).
"""

from __future__ import annotations

import functools
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
    on_compiled: Callable[[int], None] = lambda num_ready: None,
) -> None:
    """Compiles each program as soon as it is lowered.

    programs: the parts of each, lowered as it is drawn, in the caller's thread. on_compiled: told
    now and then how many are ready.
    """
    run_side_by_side((functools.partial(_compile, parts) for parts in programs), on_compiled)


def run_side_by_side(
    jobs: Iterable[Callable[[], None]], on_done: Callable[[int], None] = lambda num_done: None
) -> None:
    """Runs jobs that mostly compile, as many at once as there are CPUs, as they are drawn.

    on_done: told now and then how many are done. An error, or Ctrl-C, drops those that have not
    begun; Ctrl-C does not wait for the others either.
    """
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix=COMPILING)
    waiting: set[Future[None]] = set()
    num_done = 0

    def look(timeout_s: float) -> None:
        nonlocal waiting, num_done
        done, waiting = wait(waiting, timeout_s)
        for each in done:
            each.result()
        num_done += len(done)
        on_done(num_done)

    try:
        for job in jobs:
            waiting.add(pool.submit(job))
            look(0)
        while waiting:
            look(_SHOWN_EVERY_S)
    except BaseException as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()


def _compile(parts: Sequence[Lowered]) -> None:
    for lowered in parts:
        lowered.compile()
