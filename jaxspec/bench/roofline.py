"""`jaxspec bench roofline`: a step of the engine against what the machine can do at best.

Random weights of a named shape and a forced accept length, so that nothing is loaded and every run
does the same work; through the engine's own loop with all that is in it: sampling, relay, page
tables, and the copy of the output.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.bench.compilations import count_compilations
from jaxspec.bench.floor import (
    Machine,
    Work,
    measure_machine,
    prefill_flops,
)
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.settings import Settings
from jaxspec.bench.shape_rig import ShapeRig, itemsize, memory_in_use
from jaxspec.bench.shapes import DRAFTERS, SHAPES, random_target, step_work
from jaxspec.bench.step_profile import profile_calls
from jaxspec.bench.step_times import Recorder
from jaxspec.config import ConfigError
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.assemble import choose_dtype
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import Step
from kernels_pallas.dispatch import Device

_percent = number(1)
COLUMNS = (
    Column("step", "step"),
    Column("batch", "batch", str),
    Column("context", "context", number(0)),
    Column("ms", "ms/step", number(3)),
    Column("floor_ms", "floor ms", number(3)),
    Column("ratio", "ratio", number(2)),
    Column("idle_percent", "idle %", _percent),
    Column("blocking_idle_percent", "no overlap", _percent),
    Column("dispatch_ms", "dispatch ms", number(2)),
    Column("launches", "launches", number(0)),
    Column("tokens_per_s", "tokens/s", number(0)),
)
PROMPTS = (1000, 8000)
# Columns that say nothing of a prompt.
_OF_STEPS = (
    "idle_percent",
    "blocking_idle_percent",
    "dispatch_ms",
    "launches",
    "tokens_per_s",
)
_SETTLE = 4  # dispatches before the clock starts: the second of a program records its graph
_PROFILED = 3


def run(settings: Settings) -> Result:
    """Measures each drafter's steps at each batch size, and prompts of 1,000 and 8,000 tokens."""
    check(settings)
    options, progress = settings.roofline, settings.on_progress
    shape = SHAPES[options.shape]
    dtype, _ = choose_dtype(settings.config.dtype, Device.current())
    progress("measuring the machine", 0, 0)
    machine = measure_machine(dtype)
    progress(f"making weights of {options.shape}", 0, 0)
    target = random_target(shape.target, dtype)
    steps: list[dict[str, Any]] = []
    prefills: list[dict[str, Any]] = []
    memory: dict[str, str] = {}
    for drafter in settings.drafters:
        rig = ShapeRig(
            settings.config,
            shape,
            target,
            drafter=drafter,
            dtype=dtype,
            batches=options.batch,
            split=options.split,
        )
        common = {
            "shape": options.shape,
            "step": "plain" if drafter == "none" else drafter,
            "form": "split" if options.split else "fused",
            "decode_steps": rig.geometry.decode_steps,
            "dtype": dtype,
            "kernels": dataclasses.asdict(rig.geometry.kernels),
        }
        lengths = [length for length in PROMPTS if length < rig.geometry.max_model_len]
        cases = [
            (b, c) for c in options.context for b in options.batch if _fits(rig, b, c, settings)
        ]
        together = [(batch, rig.num_unknown(context)) for batch, context in cases]
        rig.compile([*together, *((1, length) for length in lengths)], progress)
        sizes = _memory(rig)
        common |= sizes
        memory[f"memory, {common['step']}"] = _in_words(sizes)
        for done, (batch, context) in enumerate(cases):
            what = f"{common['step']} at batch {batch} and context {context}"
            progress(f"timing {what}", done, len(cases))
            steps.append({**common, **_step_row(rig, settings, machine, batch, context)})
        progress(f"timing prompts with {common['step']}", 0, 0)
        common["step"] += " prefill"
        prefills += [{**common, **_prefill_row(rig, settings, machine, n)} for n in lengths]
    return Result(
        f"{options.shape} in {dtype} against the floor",
        COLUMNS,
        [*steps, *prefills],
        {
            "copy_TB_per_s": machine.copy_bytes_per_s / 1e12,
            "matmul_TFLOP_per_s": machine.flops_per_s / 1e12,
            "floor": "the larger of: weights, and KV rows in use, read once at the rate of a copy "
            "(bytes read and written); products at the rate of a large matrix product",
            "idle": "a step of the engine less one of its program called in a chain",
            "launches": "kernels and copies a step, from a profile of calls without command "
            "buffers",
            "context": "of prompts found in the prefix cache, with random numbers as KV; what does "
            "not fit into memory is left out",
            "prefill": "from a prompt handed over to its first token on the host, batch 1",
            "best of": settings.repeats,
            **memory,
        },
    )


def check(settings: Settings) -> None:
    """Raises ConfigError for what cannot be measured."""
    config, options = settings.config, settings.roofline
    longest = SHAPES[options.shape].target.max_position_embeddings
    limit = min(longest, config.max_model_len or longest)
    context = max(options.context)
    needed = context + settings.max_tokens
    if unknown := [name for name in settings.drafters if name not in DRAFTERS]:
        raise ConfigError(
            f"drafter is {unknown[0]!r}; roofline measures {', '.join(DRAFTERS)}, with random "
            "weights"
        )
    if options.split and (config.decode_steps or 1) > 1:
        raise ConfigError(
            f"decode_steps is {config.decode_steps}, but there is no loop of split steps; "
            "leave one of them out"
        )
    if max(options.batch) > config.max_num_seqs:
        raise ConfigError(
            f"batch is {max(options.batch)}, but max_num_seqs is {config.max_num_seqs}; raise it"
        )
    if needed > limit:
        raise ConfigError(
            f"context {context} and max_tokens {settings.max_tokens} make {needed} tokens, "
            f"but max_model_len is {limit}; lower one of them"
        )


class Clock(Recorder):
    """A program that also measures how long its calls take on the host."""

    def __init__(self, step: Step):
        super().__init__(step)
        self.call_s: list[float] = []

    def __call__(
        self, params: ModelParams, state: EngineState, packed: np.ndarray
    ) -> tuple[EngineState, Any]:
        """Runs the program."""
        before = time.perf_counter()
        result = super().__call__(params, state, packed)
        self.call_s.append(time.perf_counter() - before)
        return result


class Timing(NamedTuple):
    """Steps of an engine in which every request decodes and nothing else happens."""

    ms: float  # of a step
    context: float  # rows of KV of a request, on average
    dispatch_ms: float  # of a call, on the host
    tokens_per_s: float
    num_compilations: int


def _fits(rig: ShapeRig, batch: int, context: int, settings: Settings) -> bool:
    """Whether the pool has pages for all requests until their end."""
    at_most = context + settings.max_tokens + 2 * rig.geometry.max_commit
    return batch * rig.geometry.pages_for(at_most) < rig.geometry.num_pages


def _step_row(
    rig: ShapeRig, settings: Settings, machine: Machine, batch: int, context: int
) -> dict[str, Any]:
    clock = Clock(rig.step)
    rounds, chains = [], []
    for _ in range(settings.repeats):
        rounds.append(_time_engine(rig, clock, batch, context, settings.max_tokens, overlap=True))
        chains.append(_chain_ms(rig, clock))
    timing = min(rounds, key=lambda each: each.ms)
    kernels = profile_calls(lambda: _call(rig, clock), _PROFILED)
    blocking = _time_engine(rig, clock, batch, context, settings.max_tokens, overlap=False)
    clock.state = None
    work = _work(rig, batch, timing.context)
    floor_ms = 1e3 * work.floor_s(machine)
    chain_ms = min(chains)
    launches = sum(row["launches"] for row in kernels) / rig.geometry.decode_steps
    return {
        "batch": batch,
        "prompt_len": context,
        "context": timing.context,
        "accept_length": rig.accept_length,
        "ms": timing.ms,
        "floor_ms": floor_ms,
        "ratio": timing.ms / floor_ms,
        "floor_bytes": work.num_bytes,
        "floor_flops": work.flops,
        "chain_ms": chain_ms,
        "idle_percent": 100 * max(0.0, 1 - chain_ms / timing.ms),
        "blocking_ms": blocking.ms,
        "blocking_idle_percent": 100 * max(0.0, 1 - chain_ms / blocking.ms),
        "dispatch_ms": timing.dispatch_ms,
        "launches": launches or None,
        "kernel_ms": sum(row["us_per_call"] for row in kernels) / 1e3 / rig.geometry.decode_steps,
        "tokens_per_s": timing.tokens_per_s,
        "num_compilations": timing.num_compilations,
        "top_kernels": kernels[:40],
    }


def _time_engine(
    rig: ShapeRig, clock: Clock, batch: int, context: int, max_tokens: int, *, overlap: bool
) -> Timing:
    """Runs until half of the tokens are there; the rest is room for the program alone."""
    clock.state = None  # as large as the pool of the engine that is built now
    requests = rig.requests(batch, context, max_tokens)
    engine = rig.engine(clock, overlap=overlap, known=requests)
    for request in requests:
        engine.add_request(request)
    num_tokens: dict[str, int] = {}
    while len(num_tokens) < batch:
        _step(engine, num_tokens)
    for _ in range(_SETTLE):
        _step(engine, num_tokens)
    a_dispatch = rig.accept_length * rig.geometry.decode_steps
    count = (max_tokens - max(num_tokens.values())) // (2 * a_dispatch)
    if count < 1:
        raise ConfigError(
            f"max_tokens is {max_tokens}, too few to time dispatches of {a_dispatch}; raise it"
        )
    before_tokens = sum(num_tokens.values())
    clock.call_s.clear()
    with count_compilations() as compiled:
        before = time.perf_counter()
        for _ in range(count):
            _step(engine, num_tokens)
        wall_s = time.perf_counter() - before
    after_tokens = sum(num_tokens.values())
    return Timing(
        ms=1e3 * wall_s / (count * rig.geometry.decode_steps),
        context=context + (before_tokens + after_tokens) / (2 * batch),
        dispatch_ms=1e3 * statistics.median(clock.call_s),
        tokens_per_s=(after_tokens - before_tokens) / wall_s,
        num_compilations=compiled.count,
    )


def _step(engine: Engine, num_tokens: dict[str, int]) -> None:
    for output in engine.step():
        num_tokens[output.request_id] = len(output.outputs[0].token_ids)


def _call(rig: ShapeRig, clock: Clock) -> EngineState:
    """Calls the program on what its last call left, as if the engine had gone on."""
    assert clock.state is not None and clock.packed is not None, "nothing was recorded"
    clock.state, _ = clock.step(rig.params, clock.state, clock.packed)
    return clock.state


def _chain_ms(rig: ShapeRig, clock: Clock, num_calls: int = 12) -> float:
    """Milliseconds of a step of calls that feed each other, none of them waited for."""
    jax.block_until_ready(clock.state)
    before = time.perf_counter()
    for _ in range(num_calls):
        _call(rig, clock)
    jax.block_until_ready(clock.state)
    return 1e3 * (time.perf_counter() - before) / (num_calls * rig.geometry.decode_steps)


def _work(rig: ShapeRig, batch: int, context: float) -> Work:
    return step_work(
        rig.shape,
        rig.drafter.name,
        block=rig.geometry.block_size,
        batch=batch,
        context=context,
        itemsize=itemsize(rig.geometry.dtype),
    )


def _prefill_row(
    rig: ShapeRig, settings: Settings, machine: Machine, num_tokens: int
) -> dict[str, Any]:
    """From a prompt handed over to its first token on the host."""
    times = []
    engine = rig.engine(rig.step, overlap=True)
    for _ in range(settings.repeats + 1):  # the first compiles, or reads what was compiled
        before = time.perf_counter()
        for request in rig.requests(1, num_tokens, 1):
            engine.add_request(request)
        while engine.has_unfinished:
            engine.step()
        times.append(time.perf_counter() - before)
    floor_ms = 1e3 * prefill_flops(rig.shape.target, num_tokens) / machine.flops_per_s
    first_token_ms = 1e3 * min(times[1:])
    return {
        "batch": 1,
        "context": num_tokens,
        "ms": first_token_ms,
        "floor_ms": floor_ms,
        "ratio": first_token_ms / floor_ms,
        **dict.fromkeys(_OF_STEPS),
    }


def _memory(rig: ShapeRig) -> dict[str, int | None]:
    """Bytes that the geometry predicts for weights and KV, and those that an engine takes."""
    engine = rig.engine(rig.step, overlap=True)
    measured = memory_in_use()
    del engine
    return {"predicted_bytes": rig.weight_bytes + rig.kv_bytes, "measured_bytes": measured}


def _in_words(sizes: dict[str, int | None]) -> str:
    predicted, measured = sizes["predicted_bytes"], sizes["measured_bytes"]
    words = f"{predicted / 1e9:.2f} GB of weights and KV predicted"
    if measured is None:
        return f"{words}; this platform does not tell what is in use"
    return f"{words}, {measured / 1e9:.2f} GB in use"
