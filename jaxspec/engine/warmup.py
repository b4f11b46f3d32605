"""Compiles every program before serving, so that nothing compiles while requests wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Lowered

from jaxspec.engine.admission import bucket
from jaxspec.engine.compile_ahead import compile_side_by_side
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_decode_batch, empty_prefill_batch
from jaxspec.mode import Mode
from jaxspec.request import SamplingParams

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
_TIMED_RUNS = 3
_RUNS = 2  # on a GPU the second records the command buffer


class Program(NamedTuple):
    """One program at one size; packed: its input of padding rows. width: tokens verified a row."""

    kind: str
    mode: Mode
    packed: np.ndarray
    width: int

    def lower(self, engine: Engine) -> Sequence[Lowered]:
        """What it takes to compile."""
        return engine.lower_idle(self.kind, self.packed, mode=self.mode, width=self.width)

    def run(self, engine: Engine) -> None:
        """Runs it, compiling what is not compiled yet, and waits for it."""
        engine.run_idle(self.kind, self.packed, mode=self.mode, width=self.width)


def warmup(
    engine: Engine,
    *,
    modes: Sequence[Mode] = (Mode.GREEDY, Mode.SAMPLED),
    on_progress: OnProgress | None = None,
) -> None:
    """Compiles every bucket of every program, side by side, and runs each twice on padding rows.

    No request's row changes. modes: whose programs; those of others compile when a request first
    needs them.
    """
    programs = programs_of(engine, modes)
    warm_up_programs(engine, programs, on_progress=on_progress)
    if engine.pace is None:
        return
    timed = [program for program in programs if program.kind != "prefill"]
    # Round after round: times are held against each other, and the machine may do other work.
    rounds = [[time_idle(engine, program) for program in timed] for _ in range(_TIMED_RUNS)]
    for program, times in zip(timed, zip(*rounds, strict=True), strict=True):
        batch = (program.kind, program.mode, len(program.packed))
        engine.pace.set_time(batch, program.width, min(times))


def warm_up_programs(
    engine: Engine, programs: Sequence[Program], *, on_progress: OnProgress | None = None
) -> None:
    """Compiles some programs, side by side, and runs each twice on padding rows."""
    tell = on_progress or (lambda what, done, total: None)
    total = len(programs)
    tell("compiling", 0, total)
    _compile(engine, programs, lambda count: tell("compiling", count, total))
    for done, program in enumerate(programs):
        tell("warming up", done, total)
        for _ in range(_RUNS):
            program.run(engine)
    tell("warming up", total, total)


def compile_for(engine: Engine, num_prompt_tokens: int, params: SamplingParams) -> None:
    """Compiles what a request alone runs, its prefill and its decode step, side by side."""
    sizes = engine.geometry
    tiles = min(-(-num_prompt_tokens // sizes.prefill_tile), sizes.prefill_buckets[-1])
    packed = empty_prefill_batch(bucket(tiles, sizes.prefill_buckets), sizes)
    programs = [Program("prefill", params.prefill_mode, packed, sizes.block_size)]
    if params.max_tokens != 1:
        needs_host = params.stop or params.mode.constrained
        kind = "decode_loop" if sizes.decode_steps > 1 and not needs_host else "decode"
        packed = empty_decode_batch(sizes.batch_buckets[0], sizes)
        programs.append(Program(kind, params.mode, packed, sizes.block_size))
    _compile(engine, programs)


def _compile(
    engine: Engine,
    programs: Sequence[Program],
    on_compiled: Callable[[int], None] = lambda num_ready: None,
) -> None:
    """Compiles side by side what can be; what could not compiles when it first runs."""
    try:
        compile_side_by_side(
            (program.lower(engine) for program in programs), on_compiled=on_compiled
        )
    except jax.errors.JaxRuntimeError as error:
        # XLA tries kernels on the device meanwhile: there may be room for one program at a time.
        log.warning("compiling one program after the other (%s)", str(error).splitlines()[0])


def programs_of(engine: Engine, modes: Sequence[Mode]) -> list[Program]:
    """The programs that serve requests of some modes, at every size."""
    geometry = engine.geometry
    all_drafts = geometry.block_size
    widths = engine.pace.widths if engine.pace is not None else (all_drafts,)
    programs = []
    for mode in modes:
        for size in geometry.prefill_buckets:
            tiles = empty_prefill_batch(size, geometry)
            programs.append(Program("prefill", mode, tiles, all_drafts))
        if mode is Mode.PROMPT_LOGPROBS:
            continue
        kinds = ["decode"]
        if geometry.decode_steps > 1 and not mode.constrained:
            kinds.append("decode_loop")
        for size in geometry.batch_buckets:
            packed = empty_decode_batch(size, geometry)
            programs += [Program(kind, mode, packed, width) for kind in kinds for width in widths]
    return programs


def time_idle(engine: Engine, program: Program) -> float:
    """Seconds of one run of a program on padding rows; see `Engine.run_idle`."""
    before = time.perf_counter()
    program.run(engine)
    return time.perf_counter() - before
