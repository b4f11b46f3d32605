"""`jaxspec bench acceptance`: how far drafts agree with the model, by kind of prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.bench.metrics import (
    Sums,
    acceptance_by_position,
    acceptance_rate,
    histogram,
    mean_accept_length,
)
from jaxspec.bench.prompts import PROMPTS
from jaxspec.bench.report import Column, Result, bars, number, shares
from jaxspec.bench.rig import build_engine, load_rig, make_requests, run_workload
from jaxspec.bench.settings import Settings
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.request import RequestOutput

COLUMNS = (
    Column("drafter", "drafter"),
    Column("kind", "prompts"),
    Column("mean_accept_length", "accept length", number(2)),
    Column("acceptance_rate", "of drafts accepted", lambda v: "-" if v is None else f"{v:.0%}"),
    Column("accept_lengths", "histogram", bars),
    Column("by_position", "of those reached, by position", shares),
    Column("num_verifies", "verifies"),
)


def run(settings: Settings) -> Result:
    """Serves the prompts with each drafter that drafts, and sums by kind."""
    rows = []
    for drafter in settings.drafters:
        if drafter == "none":
            continue
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
        kinds = [PROMPTS[index % len(PROMPTS)].kind for index in range(len(work.outputs))]
        for kind in dict.fromkeys(kinds):
            same = [o for o, k in zip(work.outputs, kinds, strict=True) if k == kind]
            rows.append(row_of(rig.drafter_name, kind, same))
        rows.append(row_of(rig.drafter_name, "all", work.outputs))
    return Result(
        "acceptance by kind of prompt",
        COLUMNS,
        rows,
        {"work": f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens, greedy"},
    )


def row_of(drafter: str, kind: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The sums of some requests and what follows from them."""
    sums = Sums()
    for output in outputs:
        sums = sums.plus(output.metrics)
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    return {
        "drafter": drafter,
        "kind": kind,
        "mean_accept_length": mean_accept_length(sums),
        "acceptance_rate": acceptance_rate(sums),
        "accept_lengths": histogram(lengths),
        "by_position": acceptance_by_position(
            histogram(lengths), sums.num_draft_tokens // max(sums.num_verifies, 1)
        ),
        **{name: getattr(sums, name) for name in Sums.__slots__},
    }
