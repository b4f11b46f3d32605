"""`jaxspec bench latency`: what one user alone waits for."""

from __future__ import annotations

import numpy as np

from jaxspec.bench.compare import not_lossless, sums_of
from jaxspec.bench.metrics import decode_tokens_per_s, mean_accept_length
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import build_engine, describe, load_rig, make_requests, run_workload
from jaxspec.bench.settings import Settings
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode

COLUMNS = (
    Column("drafter", "drafter"),
    Column("first_token_ms_p50", "first token ms, p50", number(0)),
    Column("first_token_ms_p95", "p95", number(0)),
    Column("token_ms_p50", "ms/token, p50", number(1)),
    Column("token_ms_p95", "p95", number(1)),
    Column("mean_accept_length", "accept length", number(2)),
)


def run(settings: Settings) -> Result:
    """Serves the prompts one by one with each drafter."""
    rows = []
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
        work = run_workload(engine, requests, concurrency=1)
        first = [output.metrics.time_to_first_token_s for output in work.outputs]
        rates = [decode_tokens_per_s(output) for output in work.outputs]
        first_ms = [1e3 * seconds for seconds in first if seconds is not None]
        token_ms = [1e3 / rate for rate in rates if rate is not None]
        rows.append(
            {
                **describe(rig),
                "first_token_ms_p50": _percentile(first_ms, 50),
                "first_token_ms_p95": _percentile(first_ms, 95),
                "token_ms_p50": _percentile(token_ms, 50),
                "token_ms_p95": _percentile(token_ms, 95),
                "mean_accept_length": mean_accept_length(work.stats),
                "num_compilations": work.num_compilations,
                **sums_of(work),
            }
        )
    notes = {
        "work": f"{settings.num_prompts} prompts one by one, up to {settings.max_tokens} tokens "
        "each, greedy",
        **not_lossless(rows),
    }
    return Result("latency of one request at a time", COLUMNS, rows, notes)


def _percentile(values: list[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None
