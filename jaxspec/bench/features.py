"""`jaxspec bench features`: what each sampling feature adds to a decode step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from jaxspec.bench.compilations import count_compilations
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, describe, load_rig, with_few_sizes
from jaxspec.bench.settings import Settings
from jaxspec.bench.step_times import fill_batch
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_decode_batch, empty_prefill_batch
from jaxspec.engine.warmup import Program, warm_up_programs
from jaxspec.mode import Mode
from jaxspec.request import Request, SamplingParams, StructuredOutputsParams

COLUMNS = (
    Column("drafter", "drafter"),
    Column("feature", "feature"),
    Column("mode", "programs"),
    Column("step_ms", "ms/step", number(2)),
    Column("extra_ms", "more than greedy", number(2)),
    Column("extra_percent", "%", number(0)),
    Column("cpu_ms", "CPU ms/step", number(2)),
    Column("mean_accept_length", "accept length", number(2)),
)
# Some steps to settle, then those that are timed; a feature must not end the answer meanwhile.
_SETTLE, _STEPS = 2, 6
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
    "min_tokens": {"min_tokens": 500, "stop_token_ids": (0,)},
    "30 bad_words": {"bad_words": _MANY_WORDS},
    "logprobs": {"logprobs": 20},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(regex="[a-z ,.]{4000}"),
        "ignore_eos": False,
    },
    "greedy, after all of these": {},
}


def run(settings: Settings) -> Result:
    """Times the steps of full batches in which every request asks for one feature.

    One engine a drafter. A round times each feature once, so that what else the machine does
    meets them alike; the first greedy steps run before the engine has seen any other request.
    """
    rows: list[dict[str, Any]] = []
    for drafter in settings.drafters:
        rig = load_rig(
            replace(settings.config_with(drafter), decode_steps=1),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        rig = with_few_sizes(rig, prefill=[rig.geometry.num_slots])
        asked = {name: params_of(changes, rig) for name, changes in FEATURES.items()}
        engine = build_engine(rig, modes=tuple(Mode))
        warm_up_programs(
            engine, programs_for(rig, asked.values()), on_progress=settings.on_progress
        )
        timed: dict[str, list[Round]] = {name: [] for name in asked}
        total = settings.repeats * len(asked)
        with count_compilations() as compiled:
            for done, name in enumerate(list(asked) * settings.repeats):
                settings.on_progress(f"measuring {drafter}", done, total)
                timed[name].append(time_feature(rig, engine, asked[name]))
        greedy_ms = min(each.step_ms for each in timed["greedy"])
        for name, rounds in timed.items():
            step_ms = min(each.step_ms for each in rounds)
            rows.append(
                {
                    **describe(rig),
                    "feature": name,
                    "mode": asked[name].mode.name.lower(),
                    "step_ms": step_ms,
                    "extra_ms": step_ms - greedy_ms,
                    "extra_percent": 100 * (step_ms / greedy_ms - 1),
                    "cpu_ms": min(each.cpu_ms for each in rounds),
                    "mean_accept_length": statistics.mean(r.mean_accept_length for r in rounds),
                    "num_compilations": compiled.count,
                    "rounds_ms": [each.step_ms for each in rounds],
                }
            )
    return Result(
        "what each sampling feature adds to a decode step",
        COLUMNS,
        rows,
        {
            "requests": settings.config.max_num_seqs,
            "steps": f"median of {_STEPS}, best of {settings.repeats} rounds of all features: what "
            "else the machine does only ever adds time",
        },
    )


class Round(NamedTuple):
    """The steps of one batch: the median of them and of their CPU time, and tokens a request.

    CPU time is what a CPU shared with others still tells.
    """

    step_ms: float
    cpu_ms: float
    mean_accept_length: float


def params_of(changes: dict[str, Any], rig: Rig) -> SamplingParams:
    """Changes to greedy settings under which a request goes on until the context is full.

    prompt_logprobs make all prompts run through one program, which serves whatever is asked.
    """
    if "logit_bias" in changes:  # a small vocabulary has fewer tokens
        bias = changes["logit_bias"].items()
        changes = {**changes, "logit_bias": {t: b for t, b in bias if t < rig.geometry.vocab_size}}
    endless = {"temperature": 0.0, "ignore_eos": True, "max_tokens": None, "seed": 1}
    return SamplingParams(**{**endless, "prompt_logprobs": 0, **changes})


def programs_for(rig: Rig, asked: Collection[SamplingParams]) -> list[Program]:
    """The programs that batches of such requests run."""
    sizes = rig.geometry
    width = sizes.block_size
    tiles = empty_prefill_batch(sizes.prefill_buckets[0], sizes)
    packed = empty_decode_batch(sizes.batch_buckets[0], sizes)
    return [
        *(Program("prefill", mode, tiles, width) for mode in {each.prefill_mode for each in asked}),
        *(Program("decode", mode, packed, width) for mode in sorted({each.mode for each in asked})),
    ]


def time_feature(rig: Rig, engine: Engine, asked: SamplingParams) -> Round:
    """Times decode steps, by the engine's loop, of a batch that fills all slots; ends it then."""
    names = []

    def change(request: Request) -> Request:
        names.append(request.request_id)
        # The end of a conversation, where the answer is to begin.
        prompt = request.prompt_token_ids[-rig.geometry.prefill_tile :]
        return replace(request, params=asked, prompt_token_ids=prompt)

    fill_batch(rig, engine, rig.geometry.num_slots, room_for=_STEPS + 2 * _SETTLE, change=change)
    engine.stats.reset()
    while engine.stats.num_decode_steps < _SETTLE:
        engine.step()
    engine.stats.reset()
    times, cpu_times = [], []
    for _ in range(_STEPS):
        before, cpu_before = time.perf_counter(), time.process_time()
        engine.step()
        times.append(time.perf_counter() - before)
        cpu_times.append(time.process_time() - cpu_before)
    stats = engine.stats
    accept_length = 1 + stats.num_accepted / max(1, stats.num_verifies)
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()
    step_ms, cpu_ms = (1e3 * statistics.median(each) for each in (times, cpu_times))
    return Round(step_ms, cpu_ms, accept_length)
