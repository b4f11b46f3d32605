"""Completions in bulk, on the toy target whose text is known."""

from __future__ import annotations

import pytest

from jaxspec.request import SamplingParams
from jaxspec.training import generate
from jaxspec.training.generate import Wanted, answers_wanted, complete
from tests.harness import make_engine
from tests.oracle import decode

PROMPTS = [(3, 4, 5), (7,), (9, 8, 7, 6, 5, 4), (11, 12), (30, 2, 1), (13, 14, 15, 16, 17)]


def wanted(max_tokens: int = 12) -> list[Wanted]:
    """Every other one sampled."""
    return [
        Wanted(ids, SamplingParams(temperature=float(i % 2), max_tokens=max_tokens, seed=i))
        for i, ids in enumerate(PROMPTS)
    ]


def expected(each: Wanted):
    return decode(list(each.prompt_ids), each.params, max_model_len=32)


def test_completions_are_the_targets_in_the_order_asked_for():
    """Six through three slots, greedy and sampled ones."""
    engine, counts = make_engine("none"), []
    results = complete(engine, wanted(), on_tokens=lambda *seen: counts.append(seen))
    for each, result in zip(wanted(), results, strict=True):
        want = expected(each)
        assert result.token_ids == list(want)
        assert result.ended == (want.finish_reason == "stop")
    assert counts[-1] == (6, 6, sum(len(result.token_ids) for result in results))
    engine.check_idle()


def test_a_text_that_loops_is_ended_early(monkeypatch):
    """Looked at every 4 tokens; here whatever has 8 counts as a loop."""
    monkeypatch.setattr(generate, "_LOOP_CHECK", 4)
    monkeypatch.setattr(generate, "loop_start", lambda ids: 0 if len(ids) >= 8 else None)
    engine = make_engine("none")
    results = complete(engine, wanted(max_tokens=20), stop_loops=True)
    for each, result in zip(wanted(max_tokens=20), results, strict=True):
        want = expected(each)
        cut = len(want) > 8 or (len(want) == 8 and want.finish_reason == "length")
        assert result.token_ids == list(want)[:8]
        assert result.ended == (want.finish_reason == "stop" and not cut)
    assert any(len(expected(each)) > 8 for each in wanted(max_tokens=20))
    engine.check_idle()


def test_a_fault_of_the_device_is_reported(monkeypatch):
    engine = make_engine("none")
    step = engine.step

    def faulty():
        outputs = step()
        for output in outputs:
            output.error = "slot 1: non-finite logits"
        return outputs

    monkeypatch.setattr(engine, "step", faulty)
    with pytest.raises(RuntimeError, match="the target failed on a prompt: slot 1"):
        complete(engine, wanted())


def test_a_share_of_the_answers_is_sampled():
    asked = answers_wanted([(1,)] * 400, max_tokens=5, sampled_share=0.25, temperature=0.8, seed=3)
    sampled = [each.params.temperature for each in asked if not each.params.greedy]
    assert 60 < len(sampled) < 140
    assert set(sampled) == {0.8}
    assert len({each.params.seed for each in asked}) == 400


def test_a_dispatch_of_several_steps_changes_no_completion(monkeypatch):
    """As bulk generation runs on a GPU; a loop is seen at the first look after 4 tokens."""
    monkeypatch.setattr(generate, "_LOOP_CHECK", 4)
    engine = make_engine("none", decode_steps=3)
    for each, result in zip(wanted(), complete(engine, wanted()), strict=True):
        assert result.token_ids == list(expected(each))
    monkeypatch.setattr(generate, "loop_start", lambda ids: 0)
    for result in complete(engine, wanted(max_tokens=20), stop_loops=True):
        assert len(result.token_ids) <= 4 + 3 or result.ended
    engine.check_idle()
