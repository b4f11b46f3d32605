"""`jaxspec bench host`: what the host does in a step, against a device that takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, load_rig, make_requests, time_steps
from jaxspec.bench.settings import Settings
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
        times = time_steps(rig, num_requests=count)
        rows.append(
            {
                "drafter": rig.drafter_name,
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
    steps = null_steps(rig.geometry, clock)
    engine = build_engine(rig, steps)
    for request in make_requests(
        rig, num_requests, max_tokens=rig.geometry.max_model_len, ignore_eos=True
    ):
        engine.add_request(request)
    while engine.stats.num_decode_steps < 3:
        engine.step()
    # A step may add a block to each request, which then must not be full.
    longest = int(engine._published_lens.max())
    room = (rig.geometry.max_model_len - longest) // rig.geometry.block_size - 2
    num_steps = min(_NUM_STEPS, room)
    clock.cpu_s = 0.0
    before = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    host_s = time.thread_time() - before
    return host_s / num_steps * 1e3, clock.cpu_s / num_steps * 1e3


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
    return Steps(
        prefill=clock.timed(_null_program(geometry, 1)),
        decode=clock.timed(_null_program(geometry, geometry.block_size)),
        decode_loop=None,
    )


def _null_program(geometry: Geometry, block_size: int) -> Callable[..., tuple[Any, jax.Array]]:
    # Text of all lengths and kinds: detokenising is part of the host's work.
    tokens = np.random.default_rng(0).integers(0, geometry.vocab_size, block_size)

    def program(params: Any, state: Any, packed: jax.Array) -> tuple[Any, jax.Array]:
        rows = packed.shape[0]
        columns = [*tokens.tolist(), block_size, block_size - 1, 0, 0]
        return state, jnp.broadcast_to(jnp.asarray(columns, jnp.int32), (rows, len(columns)))

    return jax.jit(program, donate_argnames="state", keep_unused=True)
