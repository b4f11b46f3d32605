"""A loaded model from which a bench builds engines, runs work and times single steps."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.bench.compilations import count_compilations
from jaxspec.bench.prompts import PROMPTS, BenchPrompt
from jaxspec.config import EngineConfig, Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.narrow import widths_of
from jaxspec.engine.accounting import EngineStats
from jaxspec.engine.admission import bucket
from jaxspec.engine.assemble import assemble, grammars_of
from jaxspec.engine.engine import Engine
from jaxspec.engine.pace import Pace
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import Steps, build_narrow_steps, build_steps
from jaxspec.mode import Mode
from jaxspec.models import Target
from jaxspec.models.config import ModelConfig
from jaxspec.prompts import encode_chat, encode_prompt
from jaxspec.request import Request, RequestOutput, SamplingParams
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.files import Progress


class Rig(NamedTuple):
    """A model and drafter with all that an engine is built from; holds no KV."""

    geometry: Geometry
    params: ModelParams
    target: Target
    drafter: Drafter
    tokenizer: Tokenizer
    model_config: ModelConfig
    drafter_name: str
    choices: tuple[tuple[str, str, str], ...]
    lossless: bool


def load_rig(config: EngineConfig, *, cache_dir: Path, on_progress: Progress) -> Rig:
    """Loads what `config` names."""
    assembled = assemble(config, cache_dir=cache_dir, on_progress=on_progress)
    return Rig(*(getattr(assembled, name) for name in Rig._fields))


def with_few_sizes(rig: Rig, *, prefill: Sequence[int]) -> Rig:
    """The rig with few programs: decode steps of all slots alone, and prefills of some sizes.

    prefill: tiles, rounded up to sizes that there are. For what padding rows do not change.
    """
    sizes = rig.geometry
    tiles = {
        bucket(min(count, sizes.prefill_buckets[-1]), sizes.prefill_buckets) for count in prefill
    }
    geometry = dataclasses.replace(
        sizes,
        batch_buckets=(bucket(sizes.num_slots, sizes.batch_buckets),),
        prefill_buckets=tuple(sorted(tiles)),
    )
    return rig._replace(geometry=geometry)


def describe(rig: Rig) -> dict[str, Any]:
    """What a row's figures hold for: acceptance and speed mean nothing without it."""
    return {
        "drafter": rig.drafter_name,
        "drafts": _drafts(rig.drafter),
        "block_size": rig.geometry.block_size,
        "decode_steps": rig.geometry.decode_steps,
        "dtype": rig.geometry.dtype,
        "kernels": dataclasses.asdict(rig.geometry.kernels),
        "chat_template": rig.tokenizer.has_chat_template,
        "lossless": rig.lossless,
    }


def _drafts(drafter: Drafter) -> str:
    if drafter.depth is not None:
        return f"tree of {drafter.num_draft_tokens}, {drafter.depth} deep"
    return f"chain of {drafter.num_draft_tokens}" if drafter.num_draft_tokens else "none"


def greedy_steps(rig: Rig) -> Steps:
    """The programs of greedy batches, the same ones for every engine of these sizes."""
    return build_steps(rig.geometry, rig.target, rig.drafter, mode=Mode.GREEDY)


def build_engine(
    rig: Rig,
    steps: Steps | None = None,
    *,
    modes: Sequence[Mode] = (Mode.GREEDY,),
    overlap: bool = True,
    adaptive: bool = False,
) -> Engine:
    """An engine with KV of its own; `steps` instead of the real programs, where given.

    adaptive: may verify fewer drafts than there are.
    """
    widths = widths_of(rig.drafter) if adaptive else (rig.drafter.block_size,)
    return Engine(
        rig.geometry,
        rig.params,
        init_state(rig.geometry, rig.target, rig.drafter),
        {
            mode: steps or build_steps(rig.geometry, rig.target, rig.drafter, mode=mode)
            for mode in modes
        },
        eos_token_ids=rig.model_config.eos_token_ids,
        make_detokenizer=lambda request: rig.tokenizer.detokenizer(),
        tokenizer=rig.tokenizer,
        grammars=grammars_of(rig.tokenizer, rig.model_config),
        overlap=overlap,
        pace=Pace(widths, rig.drafter.max_accept_length - 1) if adaptive else None,
        narrow_steps=build_narrow_steps(rig.geometry, rig.target, rig.drafter, widths[1:]),
    )


def make_requests(
    rig: Rig,
    count: int,
    *,
    max_tokens: int,
    ignore_eos: bool = False,
    prompts: Sequence[BenchPrompt] = PROMPTS,
    temperature: float = 0.0,
) -> list[Request]:
    """Requests from prompts, again from the first when they are used up; seeded by their index."""

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos, seed=index
        )

    return [
        Request(str(index), _prompt_ids(rig.tokenizer, prompt.text), params(index), prompt.text)
        for index, prompt in enumerate(itertools.islice(itertools.cycle(prompts), count))
    ]


def _prompt_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    if not tokenizer.has_chat_template:
        return encode_prompt(tokenizer, text).token_ids
    return encode_chat(tokenizer, [{"role": "user", "content": text}]).token_ids


@dataclass(frozen=True, slots=True)
class Run:
    """What a workload did.

    step_s: seconds a step of the dispatches that did nothing but decode. stats: the engine's sums.
    """

    outputs: list[RequestOutput]
    wall_s: float
    stats: EngineStats
    step_s: list[float]
    num_compilations: int

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second, prefills included."""
        return self.num_tokens / self.wall_s

    @property
    def step_ms(self) -> float | None:
        """Median duration of a decode step; None where no step did only that."""
        return statistics.median(self.step_s) * 1e3 if self.step_s else None


def run_workload(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Run:
    """Serves the requests in order, so many at a time, at most one a slot, and measures.

    on_finished: told how many are over, each time that one is.
    """
    engine.stats.reset()
    waiting = list(reversed(requests))
    finished: dict[str, RequestOutput] = {}
    step_s: list[float] = []
    was_prefill = True
    with count_compilations() as compiled:
        started = time.perf_counter()
        num_live = 0
        while waiting or engine.has_unfinished:
            while waiting and num_live < concurrency:
                engine.add_request(waiting.pop())
                num_live += 1
            num_prefills = engine.stats.num_prefill_steps
            num_decodes = engine.stats.num_decode_steps
            before = time.perf_counter()
            outputs = engine.step()
            duration = time.perf_counter() - before
            is_prefill = engine.stats.num_prefill_steps > num_prefills
            is_decode = engine.stats.num_decode_steps > num_decodes
            # A step waits for the one before it: both must be decodes. Nobody waits for a slot
            # then, so that the dispatch is a loop where the geometry has one.
            if is_decode and not (is_prefill or was_prefill):
                step_s.append(duration / engine.geometry.decode_steps)
            was_prefill = is_prefill
            for output in outputs:
                if output.finished:
                    finished[output.request_id] = output
                    num_live -= 1
                    on_finished(len(finished))
        wall_s = time.perf_counter() - started
    return Run(
        [finished[request.request_id] for request in requests],
        wall_s,
        dataclasses.replace(engine.stats, accept_lengths=list(engine.stats.accept_lengths)),
        step_s,
        compiled.count,
    )
