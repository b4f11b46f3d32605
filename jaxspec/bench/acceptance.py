"""`jaxspec bench acceptance`: how far drafts agree with the model, by set of prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.acceptance_plot import draw_acceptance
from jaxspec.bench.metrics import Sums, acceptance_by_position, acceptance_rate, histogram
from jaxspec.bench.prompts import prompt_sets
from jaxspec.bench.report import Column, Result, number, shares
from jaxspec.bench.rig import build_engine, load_rig, make_requests, run_workload, with_few_sizes
from jaxspec.bench.settings import Settings
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.request import RequestOutput
from jaxspec.training.filters import loop_start

COLUMNS = (
    Column("drafter", "drafter"),
    Column("prompts", "prompts"),
    Column("temperature", "T", number(1)),
    Column("draft_noise", "draft noise"),
    Column("mean_accept_length", "accept length", number(2)),
    Column("median_accept_length", "median of prompts", number(2)),
    Column("num_prompts", "answers"),
    Column("num_looped", "loops left out"),
    Column("tokens_per_s", "tokens/s", number(1)),
    Column("slots", "first k drafts right", shares),
)
_TILES_OF_A_PROMPT = 4


def run(settings: Settings) -> Result:
    """Serves each set of prompts with each drafter that drafts, at each temperature."""
    options = settings.acceptance
    sets = prompt_sets(settings.prompts)
    temperatures = options.temperature
    modes = [mode for mode in (Mode.GREEDY, Mode.SAMPLED) if _needed(mode, temperatures)]
    rows: list[dict[str, Any]] = []
    for drafter in settings.drafters:
        if drafter == "none":
            continue
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        # Prompts that enter together, and one that takes a free slot.
        rig = with_few_sizes(rig, prefill=[rig.geometry.prefill_buckets[-1], _TILES_OF_A_PROMPT])
        engine = build_engine(rig, modes=modes)
        warmup(engine, modes=modes, on_progress=settings.on_progress)
        for name, prompts in sets.items():
            count = min(settings.num_prompts, len(prompts))
            for temperature in temperatures:
                what = f"measuring {drafter} on {name} prompts at T = {temperature:g}"
                settings.on_progress(what, 0, count)
                requests = make_requests(
                    rig,
                    count,
                    max_tokens=settings.max_tokens,
                    prompts=prompts,
                    temperature=temperature,
                )
                work = run_workload(
                    engine,
                    requests,
                    concurrency=rig.geometry.num_slots,
                    on_finished=lambda done, what=what, total=count: settings.on_progress(
                        what, done, total
                    ),
                )
                told = {
                    "drafter": rig.drafter_name,
                    "temperature": temperature,
                    "draft_noise": rig.geometry.draft_noise,
                }
                kinds = [prompt.kind for prompt in prompts[:count]]
                # Kinds share a run: only the whole set has a speed.
                if len(set(kinds)) > 1:
                    for kind in dict.fromkeys(kinds):
                        same = [o for o, k in zip(work.outputs, kinds, strict=True) if k == kind]
                        rows.append({**told, **row_of(kind, same), "tokens_per_s": None})
                speed = {"tokens_per_s": work.tokens_per_s}
                rows.append({**told, **row_of(name, work.outputs), **speed})
    notes = {
        "work": f"up to {settings.num_prompts} prompts a set, up to {settings.max_tokens} tokens "
        f"each, {settings.config.max_num_seqs} at once",
        "accept length": "tokens of an answer after its first, a verify step; answers that repeat "
        "themselves are left out",
    }
    if options.plot is not None:
        draw_acceptance(rows, Path(options.plot))
        notes["plot"] = options.plot
    return Result("acceptance by set of prompts", COLUMNS, rows, notes)


def _needed(mode: Mode, temperatures: Sequence[float]) -> bool:
    return any((temperature > 0) == (mode is Mode.SAMPLED) for temperature in temperatures)


def row_of(prompts: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What drafts did in some answers; those that loop count nowhere, nor does a prefill's token.

    mean_accept_length: tokens a verify step adds, cut at the end of the answer, over all steps;
    None where no answer is left. median_accept_length: of the prompts' own means. slots: share of
    the steps whose first k drafts are right, k = 1... by_position: of those that got so far.
    """
    loops = [loop_start(output.outputs[0].token_ids) is not None for output in outputs]
    kept = [
        output
        for output, is_loop in zip(outputs, loops, strict=True)
        if not is_loop and output.metrics.num_verifies
    ]
    sums = Sums()
    for output in kept:
        sums = sums.plus(output.metrics)
    lengths = [length for output in kept for length in output.metrics.accept_lengths]
    num_drafts = sums.num_draft_tokens // max(sums.num_verifies, 1)
    tokens = [len(output.outputs[0].token_ids) - 1 for output in kept]
    means = [n / output.metrics.num_verifies for n, output in zip(tokens, kept, strict=True)]
    return {
        "prompts": prompts,
        "num_prompts": len(kept),
        "num_looped": sum(loops),
        "num_tokens": sum(tokens),
        "mean_accept_length": sum(tokens) / sums.num_verifies if kept else None,
        "median_accept_length": statistics.median(means) if kept else None,
        "acceptance_rate": acceptance_rate(sums),
        "slots": [
            sum(length > k for length in lengths) / len(lengths) for k in range(1, num_drafts + 1)
        ],
        "by_position": acceptance_by_position(histogram(lengths), num_drafts),
        "accept_lengths": histogram(lengths),
        **{name: getattr(sums, name) for name in Sums.__slots__},
    }
