"""Lets the target write: user turns from beginnings of them, and answers to user turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxspec.engine.assemble import Assembled
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import build_steps
from jaxspec.mode import Mode
from jaxspec.request import FinishReason, Request, SamplingParams
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.filters import loop_start
from jaxspec.training.prompts import ChatFrame, Opening

OnTokens = Callable[[int, int, int], None]  # (requests done, requests in all, tokens so far)
# Requests are added in bursts: a prefill takes about as long as a decode step, however small.
_BURST = 16  # one in so many slots is free before more are added
_LOOP_CHECK = 64  # tokens between two looks for a loop


@dataclass(frozen=True, slots=True)
class Wanted:
    """One completion to make."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Completed:
    """What the target wrote. ended: at a stop id, which is the last token."""

    token_ids: list[int]
    ended: bool


def build_bulk_engine(assembled: Assembled) -> Engine:
    """An engine that compiles one prefill and one decode program each for greedy and other batches.

    An engine has a program a power of two, which pays where it serves for long. Here all slots
    are busy but at the end, and on a GPU padding costs less than compiling.
    """
    geometry = assembled.geometry
    if jax.default_backend() == "gpu":
        geometry = replace(
            geometry,
            batch_buckets=geometry.batch_buckets[-1:],
            prefill_buckets=geometry.prefill_buckets[-1:],
        )
    target, drafter = assembled.target, assembled.drafter
    return Engine(
        geometry,
        assembled.params,
        init_state(geometry, target, drafter),
        {
            mode: build_steps(geometry, target, drafter, mode=mode)
            for mode in (Mode.GREEDY, Mode.SAMPLED)
        },
        eos_token_ids=assembled.model_config.eos_token_ids,
    )


def complete(
    engine: Engine,
    wanted: Sequence[Wanted],
    *,
    stop_loops: bool = False,
    on_tokens: OnTokens | None = None,
) -> list[Completed]:
    """Runs all completions at full batch; results in the order of `wanted`.

    stop_loops: end a text that repeats itself, see `filters.loop_start`, instead of letting it
        go on to its limit.

    Raises:
        RequestError: one of them can never run.
        RuntimeError: the device reported a fault for one of them.
    """
    results: dict[int, Completed] = {}
    slots = engine.geometry.num_slots
    burst = max(1, slots // _BURST)
    # Greedy ones together, since a batch with one sampled row runs the slower program; and the
    # longest prompts first, so that the end is not one straggler.
    order = sorted(
        range(len(wanted)),
        key=lambda i: (not wanted[i].params.greedy, -len(wanted[i].prompt_ids)),
    )
    added = tokens = 0
    while len(results) < len(wanted):
        free = slots - (added - len(results))
        if added < len(wanted) and free >= min(burst, len(wanted) - added):
            for index in order[added : added + free]:
                each = wanted[index]
                engine.add_request(Request(str(index), each.prompt_ids, each.params))
            added += min(free, len(wanted) - added)
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"the target failed on a prompt: {output.error}")
            ids = output.outputs[0].token_ids
            # A dispatch may bring several tokens: has the text passed a multiple?
            due = stop_loops and len(ids) % _LOOP_CHECK < engine.geometry.decode_steps
            loops = due and loop_start(ids) is not None
            if not output.finished and not loops:
                continue
            if not output.finished:
                engine.abort(output.request_id)
            ended = output.outputs[0].finish_reason is FinishReason.STOP
            results[int(output.request_id)] = Completed(ids, ended)
            tokens += len(ids)
        if on_tokens is not None:
            on_tokens(len(results), len(wanted), tokens)
    while engine.has_unfinished:  # steps still in flight
        engine.step()
    return [results[index] for index in range(len(wanted))]


def write_user_turns(
    engine: Engine,
    tokenizer: Tokenizer,
    starts: Sequence[tuple[ChatFrame, Opening]],
    *,
    max_tokens: int,
    seed: int,
    on_tokens: OnTokens | None = None,
) -> list[str]:
    """Completes beginnings of user turns by sampling, as the target imagines its users (Magpie,
    arXiv 2406.08464).

    Returns:
        The turns, without the chat's frame; "" for one that does not end in time.
    """
    wanted = [
        Wanted(
            tuple(tokenizer.encode(frame.before + opening.text, add_special_tokens=False)),
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=max_tokens, seed=seed + index),
        )
        for index, (frame, opening) in enumerate(starts)
        if not opening.whole
    ]
    completed = iter(complete(engine, wanted, on_tokens=on_tokens))
    turns = []
    for _, opening in starts:
        if opening.whole:
            turns.append(opening.text)
            continue
        result = next(completed)
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
        turns.append((opening.text + text).strip() if result.ended else "")
    return turns


def answers_wanted(
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    sampled_share: float,
    temperature: float,
    seed: int,
) -> list[Wanted]:
    """Answers to prompts, most of them greedy, a share sampled."""
    rng = np.random.default_rng(seed)
    sampled = rng.random(len(prompts)) < sampled_share
    return [
        Wanted(
            ids,
            SamplingParams(
                temperature=temperature if hot else 0.0, max_tokens=max_tokens, seed=seed + index
            ),
        )
        for index, (ids, hot) in enumerate(zip(prompts, sampled, strict=True))
    ]
