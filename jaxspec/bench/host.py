"""`jaxspec bench host`: what the host does in a step, against a device that takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, describe, load_rig
from jaxspec.bench.settings import Settings
from jaxspec.bench.step_times import fill_batch, time_steps
from jaxspec.config import Geometry
from jaxspec.engine.steps import Step, Steps

COLUMNS = (
    Column("drafter", "drafter"),
    Column("num_requests", "requests"),
    Column("tokens_per_step", "tokens a step"),
    Column("host_cpu_ms", "host CPU ms/step", number(2)),
    Column("dispatch_cpu_ms", "of that dispatch", number(2)),
    Column("device_step_ms", "real device ms/step", number(1)),
    Column("target_ms", "wanted", number(0)),
)
TARGET_MS = 1.0
_NUM_STEPS = 60


def run(settings: Settings) -> Result:
    """Measures the host's CPU time a step with each drafter, and the real step beside it."""
    rows = []
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        count = rig.geometry.num_slots
        settings.on_progress(f"measuring the host with {drafter}", 0, 0)
        rounds = [host_work(rig, num_requests=count) for _ in range(settings.repeats)]
        host_ms, dispatch_ms = min(rounds)
        settings.on_progress(f"measuring the device with {drafter}", 0, 0)
        times = time_steps(rig, num_requests=count, repeats=settings.repeats)
        rows.append(
            {
                **describe(rig),
                "num_requests": count,
                "tokens_per_step": count * rig.geometry.block_size,
                "host_cpu_ms": host_ms,
                "dispatch_cpu_ms": dispatch_ms,
                "device_step_ms": times.device_ms,
                "engine_step_ms": times.engine_ms,
                "exposed_host_ms": times.exposed_host_ms,
                "target_ms": TARGET_MS,
            }
        )
    return Result(
        "host work a step against a null device",
        COLUMNS,
        rows,
        {
            "host CPU": "thread time of plan, dispatch, commit and detokenise; every block is "
            f"accepted in full; the best of {settings.repeats} rounds of {_NUM_STEPS} steps",
            "null device": "programs with all arguments and donated buffers of the real ones, "
            "whose output is ready at once",
        },
    )


def host_work(rig: Rig, *, num_requests: int) -> tuple[float, float]:
    """CPU ms of the host's thread a step: (in all, of that in calling programs)."""
    clock = DispatchClock()
    engine = build_engine(rig, null_steps(rig.geometry, clock))
    longest = max(fill_batch(rig, engine, num_requests, room_for=8))
    # Every dispatch adds all that it can to each request; a few are for filling the batch.
    room = (rig.geometry.max_model_len - longest) // rig.geometry.max_commit - 6
    num_dispatches = min(_NUM_STEPS, room)
    while engine.stats.num_decode_steps < 3:
        engine.step()
    clock.cpu_s = 0.0
    before = time.thread_time()
    for _ in range(num_dispatches):
        engine.step()
    host_s = time.thread_time() - before
    a_step_ms = 1e3 / (num_dispatches * rig.geometry.decode_steps)
    return host_s * a_step_ms, clock.cpu_s * a_step_ms


class DispatchClock:
    """CPU time that the host's thread spends in calling programs."""

    def __init__(self):
        self.cpu_s = 0.0

    def timed(self, step: Step) -> Step:
        """The program, with its calls counted."""

        def call(params: Any, state: Any, packed: np.ndarray) -> tuple[Any, Any]:
            before = time.thread_time()
            result = step(params, state, packed)
            self.cpu_s += time.thread_time() - before
            return result

        return call


def null_steps(geometry: Geometry, clock: DispatchClock) -> Steps:
    """Programs that take and donate what the real ones do, and compute nothing.

    Every row commits a full block of changing tokens and never ends.
    """
    block = geometry.block_size
    return Steps(
        prefill=clock.timed(_null_program(geometry, 1)),
        decode=clock.timed(_null_program(geometry, block)),
        decode_loop=clock.timed(_null_program(geometry, block, (geometry.decode_steps,))),
    )


def _null_program(
    geometry: Geometry, block_size: int, loop: tuple[int, ...] = ()
) -> Callable[..., tuple[Any, jax.Array]]:
    # Text of all lengths and kinds: detokenising is part of the host's work.
    tokens = np.random.default_rng(0).integers(0, geometry.vocab_size, block_size)

    def program(params: Any, state: Any, packed: jax.Array) -> tuple[Any, jax.Array]:
        columns = [*tokens.tolist(), block_size, block_size - 1, 0, 0]
        shape = (*loop, packed.shape[0], len(columns))
        return state, jnp.broadcast_to(jnp.asarray(columns, jnp.int32), shape)

    return jax.jit(program, donate_argnames="state", keep_unused=True)
