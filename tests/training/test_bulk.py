"""Completions in bulk, on the toy target whose text is known."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import ModelParams
from jaxspec.drafters.none import build_none
from jaxspec.engine.state import init_state
from jaxspec.mode import Mode
from jaxspec.request import SamplingParams
from jaxspec.training import bulk as module
from jaxspec.training.bulk import Bulk, Wanted, complete
from tests.fakes import EOS, build_table_target, make_table
from tests.harness import make_geometry, shared_steps
from tests.oracle import decode

PROMPTS = [(3, 4, 5), (7,), (9, 8, 7, 6, 5, 4), (11, 12), (30, 2, 1), tuple(range(5, 22)), (13, 14)]


def make_bulk(**changes) -> Bulk:
    """Three slots; the prefill takes four tiles of four tokens, so that a long prompt is cut."""
    geometry = make_geometry(block_size=1, poison=False, **changes)
    target, drafter = build_table_target(geometry.page_size), build_none()
    return Bulk(
        geometry,
        ModelParams(jnp.asarray(make_table(0)), ()),
        shared_steps(geometry, target, drafter, mode=Mode.SAMPLED, split=False),
        init_state(geometry, target, drafter),
        eos_token_ids=(EOS,),
    )


def wanted(max_tokens: int = 12, **more) -> list[Wanted]:
    """Every other one sampled."""
    return [
        Wanted(ids, SamplingParams(temperature=float(i % 2), max_tokens=max_tokens, seed=i), **more)
        for i, ids in enumerate(PROMPTS)
    ]


@functools.cache
def expected(ids, temperature, max_tokens, seed):
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return decode(list(ids), params, max_model_len=32)


def of(each: Wanted):
    params = each.params
    return expected(each.prompt_ids, params.temperature, params.max_tokens, params.seed)


@pytest.mark.parametrize("steps", [1, 3])
def test_completions_are_the_targets_in_the_order_asked_for(steps):
    """Seven through three slots, greedy and sampled ones, a token or three a dispatch."""
    bulk = make_bulk(decode_steps=steps)
    asked = wanted()
    results = complete(bulk, asked)
    for each, result in zip(asked, results, strict=True):
        assert result.wanted is each
        assert result.token_ids.tolist() == list(of(each))
        assert result.ended == (of(each).finish_reason == "stop")
    assert {of(each).finish_reason for each in asked} == {"stop", "length"}
    assert bulk.num_tokens == sum(len(result.token_ids) for result in results)
    assert bulk.num_running == bulk.num_waiting == 0


def test_what_is_complete_may_lead_to_more():
    """As conversations do; slots are used again and again."""
    bulk, texts = make_bulk(), {}
    for each in wanted():
        bulk.add(each)
    while bulk.has_unfinished:
        for done in bulk.step():
            ids, text = tuple(done.wanted.prompt_ids), done.token_ids.tolist()
            texts[ids] = text
            if len(ids) == 2:
                bulk.add(Wanted((*ids, *text)[:6], SamplingParams(temperature=0.0, max_tokens=3)))
    assert len(texts) == len(PROMPTS) + 2
    for ids, text in texts.items():
        if ids not in PROMPTS:
            assert text == list(expected(ids, 0.0, 3, 0))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_text_that_loops_is_ended_early(monkeypatch, steps):
    """Looked at every 4 tokens; here whatever has 8 counts as a loop.

    It is seen while the next dispatch runs, whose tokens it still gets.
    """
    monkeypatch.setattr(module, "_LOOP_CHECK", 4)
    monkeypatch.setattr(module, "loop_start", lambda ids: 0 if len(ids) >= 8 else None)
    asked = wanted(max_tokens=20, stop_loops=True)
    num_cut = 0
    for each, result in zip(asked, complete(make_bulk(decode_steps=steps), asked), strict=True):
        text, got = list(of(each)), result.token_ids.tolist()
        assert got == text[: len(got)]
        if len(got) < len(text):
            num_cut += 1
            assert 8 < len(got) <= 12 + 2 * steps
            assert not result.ended
        else:
            assert result.ended == (of(each).finish_reason == "stop")
    assert num_cut > 1


def test_texts_go_on_where_loops_do_not_matter(monkeypatch):
    monkeypatch.setattr(module, "_LOOP_CHECK", 1)
    monkeypatch.setattr(module, "loop_start", lambda ids: 0)
    asked = wanted()
    for each, result in zip(asked, complete(make_bulk(), asked), strict=True):
        assert result.token_ids.tolist() == list(of(each))


def test_what_waits_can_be_dropped():
    bulk = make_bulk()
    for each in wanted():
        bulk.add(each)
    bulk.step()
    assert (bulk.num_running, bulk.num_waiting) == (3, 4)
    bulk.drop_waiting()
    done = []
    while bulk.has_unfinished:
        done += bulk.step()
    assert len(done) == 3


def test_a_prompt_without_room_for_an_answer_is_refused():
    bulk = make_bulk()
    for size in (0, 32):
        with pytest.raises(ValueError, match=f"a prompt has {size} tokens; .* fewer than 32"):
            bulk.add(Wanted((1,) * size, SamplingParams()))


def test_a_fault_of_the_device_is_reported():
    bulk = make_bulk()
    bulk._params = ModelParams(jnp.full_like(bulk._params.target, np.nan), ())
    with pytest.raises(RuntimeError, match=r"the target failed: slot 1.*not finite"):
        complete(bulk, wanted())
