"""`jaxspec bench throughput`: tokens a second as more requests run at once."""

from __future__ import annotations

from jaxspec.bench.compare import not_lossless, sums_of
from jaxspec.bench.metrics import mean_accept_length
from jaxspec.bench.prompts import all_prompts
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import build_engine, describe, load_rig, make_requests, run_workload
from jaxspec.bench.settings import Settings
from jaxspec.config import ConfigError
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode

COLUMNS = (
    Column("drafter", "drafter"),
    Column("drafts", "drafts"),
    Column("concurrency", "at once"),
    Column("tokens_per_s", "tokens/s", number(1)),
    Column("step_ms", "ms/step", number(1)),
    Column("mean_accept_length", "accept length", number(2)),
    Column("num_compilations", "compiled"),
)


def run(settings: Settings) -> Result:
    """Serves the same prompts with each drafter, 1, 2, 4, ... at once.

    Raises:
        ConfigError: more at once than there are slots or prompts.
    """
    rows = []
    wanted = wanted_concurrencies(settings)
    prompts = all_prompts(settings.prompts)
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        engine = build_engine(rig)
        warmup(engine, modes=(Mode.GREEDY,), on_progress=settings.on_progress)
        for concurrency in wanted:
            settings.on_progress(f"measuring {drafter}, {concurrency} at once", 0, 0)
            requests = make_requests(
                rig, settings.num_prompts, max_tokens=settings.max_tokens, prompts=prompts
            )
            work = run_workload(engine, requests, concurrency=concurrency)
            rows.append(
                {
                    **describe(rig),
                    "concurrency": concurrency,
                    "tokens_per_s": work.tokens_per_s,
                    "step_ms": work.step_ms,
                    "mean_accept_length": mean_accept_length(work.stats),
                    "num_compilations": work.num_compilations,
                    "num_tokens": work.num_tokens,
                    "wall_s": work.wall_s,
                    **sums_of(work),
                }
            )
    notes = {
        "work": f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens each, greedy",
        **not_lossless(rows),
    }
    return Result("throughput by concurrency", COLUMNS, rows, notes)


def wanted_concurrencies(settings: Settings) -> list[int]:
    """How many requests are to run at once, one measurement each.

    Raises:
        ConfigError: more at once than there are slots or prompts.
    """
    slots = settings.config.max_num_seqs
    wanted = list(settings.throughput.concurrency) or concurrencies(slots)
    for limit, name in ((slots, "max_num_seqs"), (settings.num_prompts, "num_prompts")):
        if max(wanted) > limit:
            raise ConfigError(
                f"{max(wanted)} requests are to run at once, but {name} is {limit}; raise it"
            )
    return wanted


def concurrencies(num_slots: int) -> list[int]:
    """1, 2, 4, ... up to the number of slots, which comes last whatever it is."""
    powers = [1 << i for i in range(num_slots.bit_length()) if 1 << i < num_slots]
    return [*powers, num_slots]
