"""Requests of every kind, chats, aborts and pressure in one engine, under each drafter.

Beside the texts, what is drafted is held to: it is what an engine drafts that serves the request
alone and keeps no pages, wherever both draft behind the same tokens. So a row of the drafter's KV
that came from a cached page, a chunk or an abort shows even where the draft is wrong anyway.
"""

import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import init_state
from jaxspec.mode import Mode
from jaxspec.request import FinishReason, Request, RequestError, SamplingParams
from jaxspec.request import StructuredOutputsParams as Structured
from tests import oracle
from tests.drafters import test_dflash_tree as dflash
from tests.drafters import test_eagle_engine as eagle
from tests.drafters import test_eagle_tree as eagle_tree
from tests.fakes import (
    EOS,
    VOCAB,
    LetterTokenizer,
    PieceDetokenizer,
    ScriptedParams,
    build_table_target,
    letter_grammars,
    letters,
    make_table,
)
from tests.harness import (
    CONTEXT,
    DISPATCH,
    NODES,
    PAGE,
    SCRIPT,
    check_logprobs,
    drafter_named,
    expected,
    make_geometry,
    script_of,
    shared_steps,
    tokens_of,
)

LETTERS = letters()
NUM_SCHEDULES = 40
# The pages that one request may need, by what its blocks reach.
FEWEST_PAGES = {"ngram": 12, "tree": 28, "dflash": 10, "dflash tree": 15, "eagle": 10}
FEWEST_PAGES["eagle tree"] = 15


@functools.cache
def recording(inner: Drafter) -> Drafter:
    """`inner`, which also keeps each slot's last drafts, and behind how many tokens they stand."""

    def init_state(num_pages, num_slots, max_len):
        drafts = jnp.zeros((num_slots + 1, inner.block_size), jnp.int32)
        return inner.init_state(num_pages, num_slots, max_len), drafts, jnp.full(len(drafts), -1)

    def draft(params, state, context):
        out, own = inner.draft(params, state[0], context)
        meant = jnp.arange(inner.block_size)[None, :] <= out.num_draft_tokens[:, None]
        drafts = jnp.where(meant, out.tokens.astype(jnp.int32), -1)
        rows, lens = context.rows, context.block.lens.astype(state[2].dtype)
        return out, (own, state[1].at[rows].set(drafts), state[2].at[rows].set(lens))

    def ingest(params, state, batch):
        own, carry = inner.ingest(params, state[0], batch)
        begins = jnp.where(batch.is_first, batch.rows, 0)
        return (own, state[1], state[2].at[begins].set(-1)), carry

    return inner._replace(init_state=init_state, draft=draft, ingest=ingest)


@functools.cache
def parts(kind: str):
    """(target, drafter, params) of a drafter over the toy target."""
    table = jnp.asarray(make_table())
    match kind:
        case "dflash" | "dflash tree":
            drafter = dflash.build(dflash.TREE if kind == "dflash tree" else None)
            return dflash.wide_table_target(), recording(drafter), dflash.params()
        case "eagle" | "eagle tree":
            drafter, own = eagle.table_eagle(eagle_tree.TREE if kind == "eagle tree" else None)
            return build_table_target(PAGE), recording(drafter), ModelParams(table, own)
    drafter = drafter_named(kind, NODES if kind == "tree" else 8)
    params = ModelParams(table, ScriptedParams(jnp.asarray(script_of(SCRIPT)), table))
    return build_table_target(PAGE), recording(drafter), params


def engine_of(kind: str, *, caching=True, overlap=True, **sizes) -> Engine:
    target, drafter, params = parts(kind)
    geometry = make_geometry(block_size=drafter.block_size, **sizes)
    return Engine(
        geometry,
        params,
        init_state(geometry, target, drafter),
        {mode: shared_steps(geometry, target, drafter, mode=mode, split=False) for mode in Mode},
        eos_token_ids=(EOS,),
        make_detokenizer=lambda _: PieceDetokenizer(LETTERS),
        tokenizer=LetterTokenizer(),
        grammars=letter_grammars(),
        overlap=overlap,
        prefix_lookahead=drafter.kv_lookahead if caching else None,
    )


def drafts_now(engine: Engine):
    """(sequence, tokens before its last drafts, bonus token and drafts) of what runs."""
    _, drafts, lens = engine._programs.state.drafter_state
    drafts, lens = np.asarray(drafts), np.asarray(lens)
    return [
        (seq, int(lens[slot]), drafts[slot].tolist())
        for slot, seq in engine._running.items()
        if lens[slot] >= 0
    ]


class Cold:
    """What an engine drafts for a request that it serves alone, from nothing."""

    def __init__(self, kind: str):
        self._engine, self._known = engine_of(kind, caching=False, overlap=False), {}

    def drafts(self, asked: Request) -> dict[int, list[int]]:
        """By the number of tokens before them."""
        key = (asked.prompt_token_ids, repr(asked.params), asked.copy_index)
        if key not in self._known:
            seen = self._known[key] = {}
            self._engine.add_request(dataclasses.replace(asked, request_id="cold"))
            while self._engine.has_unfinished:
                self._engine.step()
                seen |= {length: drafts for _, length, drafts in drafts_now(self._engine)}
        return self._known[key]


def random_params(rng: random.Random) -> dict:
    def sometimes(share: float, name: str, choose) -> None:
        if rng.random() < share:
            params[name] = choose()

    params = {"temperature": 0.0, "seed": rng.getrandbits(64), "max_tokens": None}
    sometimes(0.5, "temperature", lambda: rng.choice([0.5, 0.9, 2.0]))
    sometimes(0.3, "top_k", lambda: rng.randint(1, 9))
    sometimes(0.2, "top_p", lambda: rng.choice([0.3, 0.9]))
    sometimes(0.7, "max_tokens", lambda: rng.randint(1, 16))
    sometimes(0.2, "presence_penalty", lambda: rng.randint(-8, 8) / 4)
    sometimes(0.2, "frequency_penalty", lambda: rng.randint(-8, 8) / 4)
    sometimes(0.1, "repetition_penalty", lambda: rng.choice([0.5, 2.0]))
    sometimes(0.2, "logit_bias", lambda: {rng.randrange(VOCAB): rng.randint(-8, 8) / 4})
    sometimes(0.2, "logprobs", lambda: rng.randint(0, 5))
    sometimes(0.1, "prompt_logprobs", lambda: rng.randint(0, 5))
    sometimes(0.2, "stop", lambda: rng.sample("abcdefghijklmnopqrstuvwxyz", 3))
    if rng.random() < 0.15:
        params["structured_outputs"] = Structured(regex=rng.choice(list(oracle.AUTOMATA)))
    else:
        sometimes(0.5, "ignore_eos", lambda: True)
        sometimes(0.2, "stop_token_ids", lambda: [rng.randrange(VOCAB)])
    return params


class Schedule:
    """Steps of one engine, and what was asked, told and aborted."""

    def __init__(self, kind: str, cold: Cold, seed: int):
        rng = self.rng = random.Random(seed)
        self.cold, self.num_compared = cold, 0
        self.engine = engine_of(
            kind,
            overlap=rng.random() < 0.8,
            max_num_batched_tokens=rng.choice([DISPATCH, DISPATCH, 5, 1]),
            chunked_prefill=rng.random() < 0.8,
        )
        spare = rng.choice([0, 1, 4, 8, 20])
        self.engine._use_pool(PagePool(1 + FEWEST_PAGES[kind] + spare))
        self.roots = [[rng.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(2)]
        self.asked, self.outputs = {}, {}

    def ask(self, prompt: list[int]) -> None:
        name = f"r{len(self.asked)}"
        try:
            params = SamplingParams(**random_params(self.rng))
        except RequestError:
            return  # settings that contradict each other
        self.asked[name] = Request(name, tuple(prompt[: CONTEXT - 1]), params)
        self.engine.add_request(self.asked[name])

    def act(self) -> None:
        """A request, a turn of a chat, an abort or some steps."""
        rng, choice = self.rng, self.rng.random()
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        if choice < 0.35:
            self.ask(rng.choice(self.roots)[: rng.choice([0, 4, 8, 9, 16, 20])] + tail)
        elif choice < 0.5 and self.outputs:
            name = rng.choice(sorted(self.outputs))
            before = [*self.asked[name].prompt_token_ids, *tokens_of(self.outputs[name])]
            self.ask(before + tail[:3])
        elif choice < 0.58 and self.asked:
            aborted = self.engine.abort(rng.choice(sorted(self.asked)))
            if aborted is not None:
                self.note(aborted)
        else:
            for _ in range(rng.randint(1, 3)):
                self.step()

    def step(self) -> None:
        for output in self.engine.step():
            self.note(output)
        for seq, length, drafts in drafts_now(self.engine):
            text = [*seq.request.prompt_token_ids, *expected(seq.request)]
            wanted = self.cold.drafts(seq.request).get(length)
            if wanted is not None and length < len(text):
                assert drafts == wanted, (seq.request, length)
                self.num_compared += 1

    def note(self, output) -> None:
        name, got = output.request_id, output.outputs[0]
        before = self.outputs.get(name)
        assert before is None or not before.finished, "told of after its end"
        assert before is None or got.text.startswith(before.outputs[0].text), "text is taken back"
        self.outputs[name] = output
        tokens, reason = self.wanted(name)
        assert got.token_ids == tokens[: len(got.token_ids)]
        if got.finish_reason is FinishReason.ABORT or not output.finished:
            return
        assert (got.token_ids, got.finish_reason) == (tokens, reason)
        check_logprobs(output, self.asked[name])

    def wanted(self, name: str) -> tuple[list[int], str]:
        """Plain decoding, cut where a stop string (a letter) is complete."""
        asked = self.asked[name]
        plain = expected(asked)
        silent = set(asked.params.stop_token_ids) | (set() if asked.params.ignore_eos else {EOS})
        for place, token in enumerate(plain):
            if token not in silent and LETTERS[token].decode() in asked.params.stop:
                return list(plain)[: place + 1], "stop"
        return list(plain), plain.finish_reason


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FEWEST_PAGES)
def test_any_mix_is_drafted_for_and_told_as_by_an_engine_of_its_own(kind):
    cold, num_compared, num_cached, num_preempted = Cold(kind), 0, 0, 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(kind, cold, seed)
        for _ in range(24):
            schedule.act()
        while schedule.engine.has_unfinished:
            schedule.step()
        assert all(schedule.outputs[name].finished for name in schedule.asked)
        schedule.engine.check_idle()
        num_compared += schedule.num_compared
        num_cached += sum(output.num_cached_tokens for output in schedule.outputs.values())
        num_preempted += schedule.engine.stats.num_preemptions
    assert num_compared > 200 and num_cached > 200 and num_preempted > 2
