"""`jaxspec bench`: plain decoding against each drafter, on the same prompts in one run."""

from __future__ import annotations

from typing import Any

from jaxspec.bench.metrics import Sums, mean_accept_length
from jaxspec.bench.report import Column, Result, bars, number
from jaxspec.bench.rig import (
    Run,
    build_engine,
    describe,
    load_rig,
    make_requests,
    run_workload,
)
from jaxspec.bench.settings import Settings
from jaxspec.bench.step_times import time_steps
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode

COLUMNS = (
    Column("drafter", "drafter"),
    Column("tokens_per_s", "tokens/s", number(1)),
    Column("speedup", "speedup", number(2)),
    Column("step_ms", "ms/step", number(1)),
    Column("mean_accept_length", "accept length", number(2)),
    Column("host_ms", "host ms/step", number(2)),
    Column("exposed_host_ms", "not hidden", number(2)),
    Column("num_compilations", "compiled"),
    Column("num_equal_texts", "same text"),
)


def run(settings: Settings) -> Result:
    """Measures every drafter; the first is what the others are held against."""
    rows: list[dict[str, Any]] = []
    plain: Run | None = None
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        engine = build_engine(rig)
        warmup(engine, modes=(Mode.GREEDY,), on_progress=settings.on_progress)
        settings.on_progress(f"measuring {drafter}", 0, 0)
        requests = make_requests(rig, settings.num_prompts, max_tokens=settings.max_tokens)
        work = run_workload(engine, requests, concurrency=rig.geometry.num_slots)
        del engine
        times = time_steps(rig, num_requests=rig.geometry.num_slots, repeats=settings.repeats)
        plain = plain or work
        rows.append(
            {
                **describe(rig),
                "tokens_per_s": work.tokens_per_s,
                "speedup": work.tokens_per_s / plain.tokens_per_s,
                "step_ms": work.step_ms,
                "engine_step_ms": times.engine_ms,
                "device_step_ms": times.device_ms,
                "host_ms": times.host_ms,
                "exposed_host_ms": times.exposed_host_ms,
                "mean_accept_length": mean_accept_length(work.stats),
                "accept_lengths": accept_histogram(work),
                "num_compilations": work.num_compilations,
                "num_equal_texts": num_equal(work, plain),
                "num_tokens": work.num_tokens,
                "wall_s": work.wall_s,
                **sums_of(work),
            }
        )
    return Result(
        "plain decoding against drafters",
        COLUMNS,
        rows,
        {
            "work": f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens each, "
            f"{settings.config.max_num_seqs} at once, greedy",
            "not hidden": "ms of a step of the engine less those of its program called in a chain, "
            f"the best of {settings.repeats} rounds of each",
            **{f"accept lengths of {row['drafter']}": bars(row["accept_lengths"]) for row in rows},
            **not_lossless(rows),
        },
    )


def accept_histogram(work: Run) -> dict[int, int]:
    """How often each accept length came; those that never came are left out."""
    counts = enumerate(work.stats.accept_lengths)
    return {length: count for length, count in counts if count}


def sums_of(work: Run) -> dict[str, int]:
    """The raw sums, for the JSON."""
    sums = Sums.of(work.stats)
    return {name: getattr(sums, name) for name in Sums.__slots__}


def num_equal(work: Run, plain: Run) -> int:
    """How many requests gave the same tokens as in the plain run."""
    pairs = zip(work.outputs, plain.outputs, strict=True)
    return sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)


def not_lossless(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The warning that belongs under a table with forced accept lengths."""
    if all(row["lossless"] for row in rows):
        return {}
    return {"NOT LOSSLESS": "force_accept is set: texts are not the model's"}
