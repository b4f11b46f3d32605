"""`jaxspec bench features`: what each sampling feature adds to a decode step."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, describe, load_rig
from jaxspec.bench.settings import Settings
from jaxspec.bench.step_times import fill_batch
from jaxspec.mode import Mode
from jaxspec.request import SamplingParams, StructuredOutputsParams

COLUMNS = (
    Column("drafter", "drafter"),
    Column("feature", "feature"),
    Column("mode", "programs"),
    Column("step_ms", "ms/step", number(2)),
    Column("extra_ms", "more than greedy", number(2)),
    Column("mean_accept_length", "accept length", number(2)),
)
# Some steps to settle, then those that are timed; a feature must not end the answer meanwhile.
_SETTLE, _STEPS = 4, 16
_MANY_WORDS = tuple(f"{a}{b}" for a in "bcdfgh" for b in "aeiou")
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k, top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "penalties, temperature": {"temperature": 1.0, "frequency_penalty": 0.5},
    "logit_bias of 300": {"logit_bias": dict.fromkeys(range(300), -1.0)},
    "min_tokens": {"min_tokens": 1000, "stop_token_ids": (0,)},
    "30 bad_words": {"bad_words": _MANY_WORDS},
    "logprobs": {"logprobs": 20},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(regex="[a-z ,.]{4000}"),
        "ignore_eos": False,
    },
}


def run(settings: Settings) -> Result:
    """Times the steps of a full batch in which every request asks for one feature."""
    rows: list[dict[str, Any]] = []
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        greedy_ms = None
        for done, (feature, changes) in enumerate(FEATURES.items()):
            settings.on_progress(f"measuring {drafter}", done, len(FEATURES))
            timed = [time_feature(rig, changes) for _ in range(settings.repeats)]
            step_ms = min(row["step_ms"] for row in timed)
            greedy_ms = greedy_ms or step_ms
            rows.append(
                {
                    **describe(rig),
                    "feature": feature,
                    **timed[0],
                    "step_ms": step_ms,
                    "extra_ms": step_ms - greedy_ms,
                }
            )
    return Result(
        "what each sampling feature adds to a decode step",
        COLUMNS,
        rows,
        {
            "requests": settings.config.max_num_seqs,
            "steps": f"median of {_STEPS}, best of {settings.repeats} rounds",
        },
    )


def time_feature(rig: Rig, changes: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a decode step, by the engine's loop, of a batch that fills all slots.

    changes: to greedy `SamplingParams` that go on until the context is full.
    """
    if "logit_bias" in changes:  # a small vocabulary has fewer tokens
        bias = changes["logit_bias"].items()
        changes = {**changes, "logit_bias": {t: b for t, b in bias if t < rig.geometry.vocab_size}}
    asked = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": None, "seed": 1, **changes}
    )
    modes = sorted({Mode.GREEDY, asked.mode, asked.prefill_mode})
    engine = build_engine(rig, modes=modes)
    fill_batch(
        rig,
        engine,
        rig.geometry.num_slots,
        room_for=_STEPS + 2 * _SETTLE,
        change=lambda request: replace(request, params=asked),
    )
    while engine.stats.num_decode_steps < _SETTLE:
        engine.step()
    engine.stats.reset()
    times = []
    for _ in range(_STEPS):
        before = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - before)
    stats = engine.stats
    return {
        "mode": asked.mode.name.lower(),
        "step_ms": 1e3 * statistics.median(times),
        "mean_accept_length": 1 + stats.num_accepted / max(1, stats.num_verifies),
        "num_verifies": stats.num_verifies,
    }
