"""`jaxspec bench adaptive`: adaptive widths against always drafting and never, at each concurrency.

What else the machine does changes from minute to minute, so the ways take turns, each as often
behind one other as behind the next; after four rounds, or a multiple, no place was better.
Adaptive widths are measured twice: of an engine that has served these prompts before, and of one
that has just started and knows of no draft whether it is right.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from typing import Any

from jaxspec.bench.compare import num_equal, sums_of
from jaxspec.bench.metrics import mean_accept_length
from jaxspec.bench.prompts import all_prompts
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Run, build_engine, describe, load_rig, make_requests, run_workload
from jaxspec.bench.settings import Settings
from jaxspec.bench.throughput import wanted_concurrencies
from jaxspec.config import ConfigError
from jaxspec.drafters.narrow import widths_of
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode

COLUMNS = (
    Column("drafter", "drafter"),
    Column("concurrency", "at once"),
    Column("never_ms", "ms/token never", number(1)),
    Column("always_ms", "always", number(1)),
    Column("adaptive_ms", "adaptive", number(1)),
    Column("ratio", "better curve / adaptive", number(3)),
    Column("cpu_ratio", "in CPU s", number(3)),
    Column("started_ratio", "just started", number(3)),
    Column("started_cpu_ratio", "in CPU s", number(3)),
    Column("always_accept_length", "accept length always", number(2)),
    Column("adaptive_accept_length", "adaptive", number(2)),
    Column("num_equal_texts", "same text"),
)

_WAYS = ("never", "always", "adaptive", "started")
_PLACES = (0, 1, 3, 2)  # a balanced square: E. J. Williams, 1949


def run(settings: Settings) -> Result:
    """Serves the same prompts never, always and adaptively drafting, round after round.

    Raises:
        ConfigError: more at once than there are slots or prompts, or a drafter without drafts.
    """
    wanted = wanted_concurrencies(settings)
    prompts = all_prompts(settings.prompts)
    load = {"cache_dir": settings.cache_dir, "on_progress": settings.on_progress}
    plain = load_rig(settings.config_with("none"), **load)
    never = build_engine(plain)
    warmup(never, modes=(Mode.GREEDY,), on_progress=settings.on_progress)
    rows: list[dict[str, Any]] = []
    for drafter in settings.drafters:
        rig = load_rig(settings.config_with(drafter), **load)
        if len(widths_of(rig.drafter)) == 1:
            raise ConfigError(f"drafter {drafter!r} drafts nothing to adapt; name another")
        engines = {
            "never": never,
            "always": build_engine(rig),
            "adaptive": build_engine(rig, adaptive=True),
        }
        for name in ("always", "adaptive"):
            warmup(engines[name], modes=(Mode.GREEDY,), on_progress=settings.on_progress)
        at_start = copy.deepcopy(engines["adaptive"].pace)
        engines["started"] = engines["adaptive"]
        work = functools.partial(
            make_requests,
            rig,
            settings.num_prompts,
            max_tokens=settings.max_tokens,
            prompts=prompts,
        )
        for concurrency in wanted:
            runs: dict[str, list[Run]] = {name: [] for name in _WAYS}
            cpu_s: dict[str, list[float]] = {name: [] for name in _WAYS}

            settings.on_progress(f"warming up {drafter}, {concurrency} at once", 0, 0)
            for engine in (never, engines["always"], engines["adaptive"]):
                run_workload(engine, work(), concurrency=concurrency)
            experienced = engines["adaptive"].pace
            for turn in range(settings.repeats):
                what = f"measuring {drafter}, {concurrency} at once"
                settings.on_progress(what, turn, settings.repeats)
                for name in order_of(turn):
                    engine, requests = engines[name], work()
                    if name == "started":
                        engine.pace = copy.deepcopy(at_start)
                    before = time.process_time()
                    runs[name].append(run_workload(engine, requests, concurrency=concurrency))
                    cpu_s[name].append(time.process_time() - before)
                    engines["adaptive"].pace = experienced
            rows.append({**describe(rig), "concurrency": concurrency, **figures(runs, cpu_s)})
    notes = {
        "work": f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens each, greedy",
        "ms/token": f"medians of {settings.repeats} rounds, in which the four take turns",
        "better curve": "medians of what the ratios are within each round",
        "just started": "knows nothing of drafts yet; the other has served the prompts once before",
    }
    return Result("adaptive widths", COLUMNS, rows, notes)


def order_of(turn: int) -> list[str]:
    """The ways in the order of a round: in four rounds each comes behind each other one once."""
    return [_WAYS[(turn + place) % len(_WAYS)] for place in _PLACES]


def figures(runs: dict[str, list[Run]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    """Times of a token in each way, and how near the adaptive one comes to the better other."""
    wall_ms = {
        name: [1e3 * work.wall_s / work.num_tokens for work in each] for name, each in runs.items()
    }
    cpu_ms = {
        name: [1e3 * s / work.num_tokens for s, work in zip(each, runs[name], strict=True)]
        for name, each in cpu_s.items()
    }
    row: dict[str, Any] = {}
    for unit, times in (("ms", wall_ms), ("cpu_ms", cpu_ms)):
        for name, each in times.items():
            row[f"{name}_{unit}"] = statistics.median(each)
            row[f"{name}_{unit}_of_rounds"] = each
    for name in ("always", "adaptive", "started"):
        row[f"{name}_accept_length"] = mean_accept_length(runs[name][-1].stats)
    return {
        **row,
        "ratio": ratio_to_better(wall_ms, "adaptive"),
        "cpu_ratio": ratio_to_better(cpu_ms, "adaptive"),
        "started_ratio": ratio_to_better(wall_ms, "started"),
        "started_cpu_ratio": ratio_to_better(cpu_ms, "started"),
        "num_equal_texts": num_equal(runs["adaptive"][-1], runs["never"][-1]),
        "num_compilations": sum(work.num_compilations for each in runs.values() for work in each),
        **sums_of(runs["adaptive"][-1]),
    }


def ratio_to_better(times: dict[str, list[float]], way: str) -> float:
    """Speed of an adaptive way as a share of the better other one's; above 1 it beats both.

    Rounds are compared within themselves, where the machine was much the same; the better way is
    the one that was better over all of them.
    """
    better = min(("never", "always"), key=lambda name: statistics.median(times[name]))
    pairs = zip(times[better], times[way], strict=True)
    return statistics.median(best / adaptive for best, adaptive in pairs)
