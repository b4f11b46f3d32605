"""`jaxspec bench forward`: a step of the engine against the bare model in the same run."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, describe, greedy_steps, load_rig
from jaxspec.bench.settings import Settings
from jaxspec.bench.step_times import Recorder, fill_batch
from jaxspec.cache.kv_pages import kv_locs_at
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Block

COLUMNS = (
    Column("drafter", "drafter"),
    Column("num_requests", "requests"),
    Column("block_size", "tokens each"),
    Column("engine_ms", "engine ms/step", number(2)),
    Column("forward_ms", "bare forward ms", number(2)),
    Column("ratio", "ratio", number(3)),
    Column("wanted", "wanted", number(1)),
)
WANTED = 1.2
_NUM_STEPS = 12  # of each in a round


def run(settings: Settings) -> Result:
    """Times both in turns, so that what else the machine does meets both alike."""
    rows = []
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        settings.on_progress(f"measuring {drafter}", 0, 0)
        engine_s, forward_s = in_turns(rig, settings.repeats)
        engine_ms, forward_ms = (1e3 * statistics.median(each) for each in (engine_s, forward_s))
        rows.append(
            {
                **describe(rig),
                "num_requests": rig.geometry.num_slots,
                "engine_ms": engine_ms,
                "forward_ms": forward_ms,
                "engine_ms_min": 1e3 * min(engine_s),
                "forward_ms_min": 1e3 * min(forward_s),
                "ratio": engine_ms / forward_ms,
                "wanted": WANTED,
            }
        )
    return Result(
        "an engine step against the bare jitted forward",
        COLUMNS,
        rows,
        {
            "bare forward": "the target's layers and logits over as many tokens, KV donated, "
            "calls dispatched in a chain",
            "medians of": f"{settings.repeats} rounds of {_NUM_STEPS} steps each, in turns",
        },
    )


def in_turns(rig: Rig, num_rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step, of the engine and of the bare forward, one entry a round."""
    kind = "decode" if rig.geometry.decode_steps == 1 else "decode_loop"
    steps = greedy_steps(rig)
    recorder = Recorder(getattr(steps, kind))
    engine = build_engine(rig, steps._replace(**{kind: recorder}))
    num_dispatches = max(2, _NUM_STEPS // rig.geometry.decode_steps)
    room = num_rounds * (num_dispatches + 1) + 5
    lens = fill_batch(rig, engine, rig.geometry.num_slots, room_for=room)
    while engine.stats.num_decode_steps < 3:
        engine.step()
    bare = BareForward(rig, lens)
    engine_s, forward_s = [], []
    for _ in range(num_rounds):
        engine.step()  # fills the pipeline: from here on, one step lands for one dispatched
        before = time.perf_counter()
        for _ in range(num_dispatches):
            engine.step()
        num_steps = num_dispatches * rig.geometry.decode_steps
        engine_s.append((time.perf_counter() - before) / num_steps)
        jax.block_until_ready(recorder.state)  # the step in flight is no time of the bare forward
        forward_s.append(bare.time(_NUM_STEPS))
    return engine_s, forward_s


class BareForward:
    """The target's forward over a decode batch's shapes, and nothing else."""

    def __init__(self, rig: Rig, lens: list[int]):
        geometry, target = rig.geometry, rig.target
        count, size = len(lens), geometry.block_size
        tables = np.zeros((count, geometry.pages_per_slot), np.int32)
        used = geometry.pages_for(max(lens) + size)
        tables[:, :used] = 1 + np.arange(count * used, dtype=np.int32).reshape(count, used)
        start = np.asarray(lens, np.int32)
        positions = jnp.asarray(start[:, None] + np.arange(size, dtype=np.int32)[None, :])
        page_table = jnp.asarray(tables)
        self._block = Block(
            token_ids=jnp.ones((count, size), token_dtype()),
            positions=positions,
            kv_locs=kv_locs_at(page_table, positions, geometry.page_size),
            page_table=page_table,
            lens=jnp.asarray(start),
        )
        self._params = rig.params.target

        def forward(params: Any, kv: Any, block: Block) -> tuple[Any, jax.Array]:
            out = target.forward(params, kv, block)
            return out.kv, target.logits(params, out.hidden)

        self._forward = jax.jit(forward, donate_argnames="kv")
        self._kv = target.init_kv(geometry.num_pages)
        self.time(2)

    def time(self, num_steps: int) -> float:
        """Seconds a step of so many in a chain."""
        jax.block_until_ready(self._kv)
        before = time.perf_counter()
        for _ in range(num_steps):
            self._kv, _ = self._forward(self._params, self._kv, self._block)
        jax.block_until_ready(self._kv)
        return (time.perf_counter() - before) / num_steps
