"""`jaxspec bench serve-mix`: many requests at once; what cache, chunks and few pages do."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.compare import not_lossless
from jaxspec.bench.compilations import count_compilations
from jaxspec.bench.prompts import PROMPTS
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, describe, greedy_steps, load_rig
from jaxspec.bench.settings import Settings
from jaxspec.config import ConfigError, Geometry
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import Steps
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.prompts import encode_prompt
from jaxspec.request import FinishReason, Request, RequestOutput, SamplingParams

_OWN_TOKENS = 24  # that a prompt has behind the common prefix
_OVERLOAD = 4  # times the pages that all requests together would need

COLUMNS = (
    Column("mix", "mix"),
    Column("variant", "variant"),
    Column("drafter", "drafter"),
    Column("tokens_per_s", "tokens/s", number(1)),
    Column("first_token_s_p50", "first token s, p50", number(2)),
    Column("first_token_s_p99", "p99", number(2)),
    Column("gap_ms_p50", "gap ms, p50", number(0)),
    Column("gap_ms_p99", "p99", number(0)),
    Column("num_cached_tokens", "cached"),
    Column("num_preemptions", "preempted"),
    Column("num_lost", "lost"),
)


class Mix(NamedTuple):
    """Requests, and the engines that serve them: variant -> (changes of sizes, prefix cache)."""

    name: str
    requests: list[Request]
    variants: dict[str, tuple[dict[str, Any], bool]]


def run(settings: Settings) -> Result:
    """Serves each mix in each of its variants, with each drafter."""
    rows = []
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        mixes, steps = make_mixes(rig, settings), greedy_steps(rig)
        warmup(make_engine(rig, steps), modes=(Mode.GREEDY,), on_progress=settings.on_progress)
        for mix in mixes:
            texts: list[list[int]] | None = None
            for variant, (changes, caching) in mix.variants.items():
                served = serve(
                    make_engine(rig, steps, caching=caching, **changes),
                    mix.requests,
                    on_progress=functools.partial(
                        settings.on_progress, f"measuring {drafter}, {mix.name}, {variant}"
                    ),
                )
                texts = texts or served.texts
                rows.append(
                    {
                        "mix": mix.name,
                        "variant": variant,
                        **describe(rig),
                        **served.figures(),
                        "num_equal_texts": sum(map(operator.eq, texts, served.texts)),
                    }
                )
    notes = {
        "work": f"{settings.num_prompts} requests, all there at the beginning, "
        f"{settings.max_tokens} tokens each, greedy",
        "prefix": f"{settings.serve_mix.prefix} tokens",
        **not_lossless(rows),
    }
    return Result("mixes of requests", COLUMNS, rows, notes)


def make_mixes(rig: Rig, settings: Settings) -> list[Mix]:
    """A common prefix, long prompts, long answers, and too few pages.

    Raises:
        ConfigError: the context does not hold prefix and answer.
    """
    count, tokens, prefix_len = settings.num_prompts, settings.max_tokens, settings.serve_mix.prefix
    needed = prefix_len + _OWN_TOKENS + 2 * tokens
    if needed > rig.geometry.max_model_len:
        raise ConfigError(
            f"max_model_len is {rig.geometry.max_model_len}, but prefix and answers need {needed}; "
            "raise it or lower --prefix"
        )
    text = prompt_ids(rig, max(prefix_len, _OWN_TOKENS + count))
    prefix = text[:prefix_len]
    own = [text[i : i + _OWN_TOKENS] for i in range(count)]
    ids = [*zip(range(count), own, strict=True)]
    common = [make_request(i, (*prefix, i + 1, *tail), tokens) for i, tail in ids]
    distinct = [make_request(i, (i + 1, *prefix, *tail), max(tokens // 2, 2)) for i, tail in ids]
    answers = [make_request(i, (i + 1, *tail), 2 * tokens) for i, tail in ids]
    chunks = {
        "chunks": ({}, True),
        "prompts first": ({"chunked_prefill": False}, True),
    }
    mixes = [
        Mix("common prefix", common, {"no cache": ({}, False), "cache": ({}, True)}),
        Mix("long prompts", distinct, chunks),
        Mix("long answers", answers, chunks),
        Mix(
            "overload",
            answers,
            {
                "enough pages": ({}, True),
                "too few pages": ({"num_pages": few_pages(rig.geometry, answers)}, True),
            },
        ),
    ]
    return [mix for mix in mixes if mix.name in settings.serve_mix.mix]


def few_pages(geometry: Geometry, requests: Sequence[Request]) -> int:
    """A pool that the requests running at once would need `_OVERLOAD` times over."""
    largest = [
        geometry.pages_at_most(len(request.prompt_token_ids) + request.params.max_tokens)
        for request in requests[: geometry.num_slots]
    ]
    return 1 + max(sum(largest) // _OVERLOAD, max(largest))


def prompt_ids(rig: Rig, count: int) -> tuple[int, ...]:
    """So many token ids of the built-in prompts, again from the first when they are used up."""
    ids = encode_prompt(rig.tokenizer, "\n".join(prompt.text for prompt in PROMPTS)).token_ids
    return (ids * -(-count // len(ids)))[:count]


def make_request(index: int, ids: tuple[int, ...], max_tokens: int) -> Request:
    """A greedy request of a fixed number of tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(str(index), ids, params)


def make_engine(rig: Rig, steps: Steps, *, caching: bool = True, **changes: Any) -> Engine:
    """An engine of the same programs, whatever its host is told otherwise."""
    return Engine(
        dataclasses.replace(rig.geometry, **changes),
        rig.params,
        init_state(rig.geometry, rig.target, rig.drafter),
        {Mode.GREEDY: steps},
        eos_token_ids=rig.model_config.eos_token_ids,
        prefix_lookahead=rig.drafter.kv_lookahead if caching else None,
    )


class Served(NamedTuple):
    """What became of the requests; gap_s: between two results of the same request."""

    outputs: list[RequestOutput]
    num_asked: int
    wall_s: float
    gap_s: list[float]
    num_preemptions: int
    num_compilations: int

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of each answer."""
        return [output.outputs[0].token_ids for output in self.outputs]

    def figures(self) -> dict[str, Any]:
        """Throughput, waiting times and what was lost."""
        first = [output.metrics.time_to_first_token_s for output in self.outputs]
        num_tokens = sum(map(len, self.texts))
        full = [o for o in self.outputs if o.outputs[0].finish_reason is FinishReason.LENGTH]
        p50, p99 = np.percentile(first, [50, 99])
        gap_p50, gap_p99 = np.percentile([1e3 * gap for gap in self.gap_s] or [0.0], [50, 99])
        return {
            "num_requests": self.num_asked,
            "num_lost": self.num_asked - len(full),
            "num_tokens": num_tokens,
            "wall_s": self.wall_s,
            "tokens_per_s": num_tokens / self.wall_s,
            "first_token_s_p50": float(p50),
            "first_token_s_p99": float(p99),
            "gap_ms_p50": float(gap_p50),
            "gap_ms_p99": float(gap_p99),
            "num_cached_tokens": sum(output.num_cached_tokens for output in self.outputs),
            "num_preemptions": self.num_preemptions,
            "num_compilations": self.num_compilations,
        }


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Served:
    """Adds all requests at once and serves them to their ends.

    on_progress: told the tokens of all answers so far, and of all in the end.
    """
    last_s: dict[str, float] = {}
    finished: dict[str, RequestOutput] = {}
    gap_s: list[float] = []
    num_told: dict[str, int] = {}
    total = sum(request.params.max_tokens for request in requests)
    with count_compilations() as compiled:
        started = time.perf_counter()
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id
                if name in last_s:
                    gap_s.append(now - last_s[name])
                last_s[name] = now
                num_told[name] = len(output.outputs[0].token_ids)
                if output.finished:
                    finished[name] = output
            on_progress(sum(num_told.values()), total)
        wall_s = time.perf_counter() - started
    names = [request.request_id for request in requests]
    ended = [finished[name] for name in names if name in finished]
    return Served(ended, len(requests), wall_s, gap_s, engine.stats.num_preemptions, compiled.count)
