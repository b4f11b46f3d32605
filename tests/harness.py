"""Small engines around the toy models, and runs to their end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.config import Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.narrow import narrow as narrow_drafter
from jaxspec.drafters.ngram import build_ngram
from jaxspec.drafters.none import build_none
from jaxspec.engine.engine import Engine, unwatched
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import Steps, build_steps
from jaxspec.mode import Mode
from jaxspec.models.base import Target
from jaxspec.request import Request, RequestOutput, SamplingParams
from tests import oracle
from tests.fakes import (
    EOS,
    VOCAB,
    LetterTokenizer,
    ScriptedParams,
    build_random_drafter,
    build_scripted_drafter,
    build_table_target,
    build_tree_drafter,
    letter_grammars,
    make_table,
)

CONTEXT = 32
PAGE = 4
BLOCK = 8
NODES = 37  # of trees as deep as a block: two words of the mask
SLOTS = 3
TILE = 4
DISPATCH = 4 * TILE  # prompt tokens that one prefill dispatch holds
LOOP_STEPS = 3
SCRIPT = (3, 0, 7, 1, 5, 2, 6, 4)


def make_geometry(**changes) -> Geometry:
    """Context 32, block 8, page 4 as in the fault table; one bucket each, so one program a kind.

    Three slots in batches of four rows: a padding row stands in every batch. The page table has
    room for loops of `LOOP_STEPS`, so that engines with and without them share their programs.
    """
    block = changes.pop("block_size", BLOCK)
    slots = changes.pop("num_slots", SLOTS)
    max_len = changes.pop("max_model_len", CONTEXT)
    page = changes.pop("page_size", PAGE)
    buckets = changes.setdefault("prefill_buckets", (4,))
    per_slot = -(-(max_len + 2 * block * LOOP_STEPS) // page)
    values = dict(
        vocab_size=VOCAB,
        num_slots=slots,
        num_pages=1 + slots * per_slot,
        page_size=page,
        pages_per_slot=per_slot,
        max_model_len=max_len,
        block_size=block,
        prefill_tile=TILE,
        max_num_batched_tokens=buckets[-1] * TILE,
        batch_buckets=(slots + 1,),
        decode_steps=1,
        max_stop_ids=4,
        poison=True,
    )
    return Geometry(**{**values, **changes})


def drafter_named(name: str, block: int = BLOCK, page: int = PAGE) -> Drafter:
    """The toy and model-free drafters by name."""
    match name:
        case "none":
            return build_none()
        case "ngram":
            return build_ngram(num_draft_tokens=block - 1, ngram_max=3, page_size=page)
        case "scripted":
            return build_scripted_drafter(block - 1, page)
        case "random":
            return build_random_drafter(block - 1)
        case "tree":
            return build_tree_drafter(block, BLOCK - 1, page)
    raise KeyError(name)


def make_engine(
    drafter: str | Drafter = "scripted",
    *,
    accepts: Sequence[int] | int = SCRIPT,
    overlap: bool = True,
    split: bool = False,
    make_detokenizer=None,
    table_seed: int = 0,
    expected_accept_length: float | None = None,
    prefix_caching: bool = True,
    pace=None,
    watch_step=unwatched,
    **geometry_changes,
) -> Engine:
    """An engine over the table target.

    accepts: how many drafts are right, by position of the bonus token (repeated), or always.
    """
    if drafter in ("none", "tree"):
        geometry_changes.setdefault("block_size", 1 if drafter == "none" else NODES)
    geometry = make_geometry(**geometry_changes)
    if isinstance(drafter, str):
        drafter = drafter_named(drafter, geometry.block_size, geometry.page_size)
    target = build_table_target(geometry.page_size)
    table = jnp.asarray(make_table(table_seed))
    script = script_of(accepts)
    params = ModelParams(table, ScriptedParams(jnp.asarray(script), table))
    steps = {mode: shared_steps(geometry, target, drafter, mode=mode, split=split) for mode in Mode}
    narrow = {
        width: {
            mode: shared_steps(
                geometry, target, narrow_drafter(drafter, width, PAGE), mode=mode, split=split
            )
            for mode in Mode
        }
        for width in (pace.widths[1:] if pace is not None else ())
    }
    return Engine(
        geometry,
        params,
        init_state(geometry, target, drafter),
        steps,
        eos_token_ids=(EOS,),
        make_detokenizer=make_detokenizer,
        tokenizer=LetterTokenizer(),
        grammars=letter_grammars(),
        overlap=overlap,
        pace=pace,
        watch_step=watch_step,
        narrow_steps=narrow,
        prefix_lookahead=drafter.kv_lookahead if prefix_caching else None,
        expected_accept_length=expected_accept_length,
    )


def shared_steps(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode, split: bool
) -> Steps:
    """`build_steps`, where programs that do not depend on a setting are built without it.

    Loops and buckets concern the host, forcing the decode step alone; compiling is what tests
    spend their time on.
    """
    own = build_steps(geometry, target, drafter, mode=mode, split=split)
    plain = dict(decode_steps=1, prefill_buckets=(4,), batch_buckets=(4,))
    plain |= dict(max_num_batched_tokens=DISPATCH, chunked_prefill=True)
    common = dataclasses.replace(geometry, **plain)
    decode = build_steps(common, target, drafter, mode=mode, split=split).decode
    unforced = dataclasses.replace(common, force_accept=None)
    prefill = build_steps(unforced, target, drafter, mode=mode).prefill
    return Steps(prefill=prefill, decode=decode, decode_loop=own.decode_loop)


def script_of(accepts: Sequence[int] | int) -> np.ndarray:
    """How many drafts are right, by position of the bonus token; shorter lists repeat."""
    pattern = [accepts] if isinstance(accepts, int) else list(accepts)
    return np.resize(np.asarray(pattern, np.int32), 2 * CONTEXT)


def request(name: str, prompt: list[int], **params) -> Request:
    """A request with greedy defaults."""
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", 12)
    return Request(name, tuple(prompt), SamplingParams(**params))


def run(engine: Engine, *requests: Request, max_steps: int = 500) -> dict[str, RequestOutput]:
    """Adds the requests and steps until all are over."""
    for each in requests:
        engine.add_request(each)
    return drain(engine, max_steps)


def drain(engine: Engine, max_steps: int = 500) -> dict[str, RequestOutput]:
    """Steps until the engine has nothing left; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return last
        for output in engine.step():
            last[output.request_id] = output
    raise AssertionError(f"the engine is not done after {max_steps} steps")


def tokens_of(output: RequestOutput) -> list[int]:
    """Token ids of a request's completion."""
    return output.outputs[0].token_ids


_EXPECTED: dict[str, oracle.Expected] = {}


def expected(asked: Request) -> oracle.Expected:
    """What plain decoding in plain Python makes of a request."""
    prompt, key = list(asked.prompt_token_ids), repr(asked)
    if key not in _EXPECTED:
        _EXPECTED[key] = oracle.decode(
            prompt, asked.params, max_model_len=CONTEXT, copy_index=asked.copy_index
        )
    return _EXPECTED[key]


def check(outputs: dict[str, RequestOutput], *requests: Request) -> None:
    """Asserts that each request ended as plain decoding does."""
    for asked in requests:
        want, output = expected(asked), outputs[asked.request_id]
        assert tokens_of(output) == list(want), asked
        assert output.finished
        assert output.outputs[0].finish_reason == want.finish_reason, asked


def check_logprobs(output: RequestOutput, asked: Request) -> None:
    """Asserts that the log-probabilities are those of plain decoding, of what was put out."""
    prompt, tokens = list(asked.prompt_token_ids), tokens_of(output)
    params, completion = asked.params, output.outputs[0]
    of_prompt = output.prompt_logprobs
    told = [(completion.logprobs, params.logprobs, prompt + tokens, len(prompt))]
    if of_prompt is not None:
        assert of_prompt[0] is None
        told.append((of_prompt[1:], params.prompt_logprobs, prompt, 1))
    for entries, num_top, text, first in told:
        if num_top is None:
            assert entries is None
            continue
        wanted = oracle.logprobs(text, first, num_top)
        assert len(entries) == len(wanted)
        for entry, want in zip(entries, wanted, strict=True):
            assert {token: each.rank for token, each in entry.items()} == {
                token: rank for token, (_, rank) in want.items()
            }
            assert list(entry) == list(want)
            values = [each.logprob for each in entry.values()]
            np.testing.assert_allclose(values, [value for value, _ in want.values()], atol=1e-5)
    if completion.logprobs is not None:
        chosen = [e[t].logprob for e, t in zip(completion.logprobs, tokens, strict=True)]
        np.testing.assert_allclose(completion.cumulative_logprob, sum(chosen), atol=1e-5)


def scripted_accept_lengths(asked: Request, accepts: Sequence[int] | int) -> list[int]:
    """The accept lengths that the scripted drafter must show on a request that runs to its end."""
    script, lengths = script_of(accepts), []
    emitted, total, start = 1, len(expected(asked)), len(asked.prompt_token_ids)
    while emitted < total:
        lengths.append(int(script[start + emitted - 1]) + 1)
        emitted += lengths[-1]
    return lengths


class Call(NamedTuple):
    """A program that the host loop called."""

    kind: str  # "prefill" | "decode" | "decode_loop"
    mode: Mode
    packed: np.ndarray  # the very array that was handed over


def intercept(engine: Engine, around) -> None:
    """Puts `around(kind, mode, step, params, state, packed)` in place of each program."""
    for mode, steps in list(engine._programs.steps.items()):
        wrapped = {
            kind: functools.partial(around, kind, mode, step) if step is not None else None
            for kind, step in steps._asdict().items()
        }
        engine._programs.steps[mode] = Steps(**wrapped)


def record(engine: Engine) -> list[Call]:
    """Records every program that the engine calls from now on."""
    calls: list[Call] = []

    def around(kind, mode, step, params, state, packed):
        calls.append(Call(kind, mode, packed))
        return step(params, state, packed)

    intercept(engine, around)
    return calls
