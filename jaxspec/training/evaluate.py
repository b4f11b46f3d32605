"""How many tokens a verify step yields on a set of prompts, loops left out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.engine.engine import Engine
from jaxspec.request import Request, RequestOutput, SamplingParams
from jaxspec.training.filters import loop_start


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a drafter did on a set of prompts; the prefill's token counts nowhere.

    num_looped: answers left out because they repeat themselves. mean_accept_length: tokens a
    verify step adds, cut at the end of the answer, over all steps. median_accept_length: of the
    prompts' own means. slots: share of the verify steps whose first k drafts are right, k = 1...
    """

    num_prompts: int
    num_looped: int
    num_verifies: int
    num_tokens: int
    mean_accept_length: float
    median_accept_length: float
    slots: tuple[float, ...]


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int = 0,
) -> Acceptance:
    """Serves the prompts and counts.

    Raises:
        ValueError: every answer is a loop or has one token.
    """
    for index, ids in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index)
        engine.add_request(Request(str(index), tuple(ids), params))
    finished: list[RequestOutput] = []
    while engine.has_unfinished:
        finished += [output for output in engine.step() if output.finished]
    return acceptance_of(finished, num_drafts=engine.geometry.block_size - 1)


def acceptance_of(outputs: Sequence[RequestOutput], *, num_drafts: int) -> Acceptance:
    """Counts what finished requests did.

    Raises:
        ValueError: every answer is a loop or has one token.
    """
    kept = [
        output
        for output in outputs
        if loop_start(output.outputs[0].token_ids) is None and output.metrics.num_verifies
    ]
    if not kept:
        raise ValueError(
            f"none of {len(outputs)} answers is free of loops and longer than a token; give other "
            "prompts"
        )
    tokens = [len(output.outputs[0].token_ids) - 1 for output in kept]
    verifies = [output.metrics.num_verifies for output in kept]
    lengths = [length for output in kept for length in output.metrics.accept_lengths]
    return Acceptance(
        num_prompts=len(kept),
        num_looped=sum(loop_start(output.outputs[0].token_ids) is not None for output in outputs),
        num_verifies=sum(verifies),
        num_tokens=sum(tokens),
        mean_accept_length=sum(tokens) / sum(verifies),
        median_accept_length=statistics.median(
            own / steps for own, steps in zip(tokens, verifies, strict=True)
        ),
        slots=tuple(
            sum(length > k for length in lengths) / len(lengths) for k in range(1, num_drafts + 1)
        ),
    )
