"""Accept lengths of finished requests, by hand."""

from __future__ import annotations

import pytest

from jaxspec.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxspec.training.card import CardFacts, model_card
from jaxspec.training.evaluate import acceptance_of, measure_acceptance
from tests.harness import CONTEXT, make_engine
from tests.training.tiny import DRAFTER


def finished(token_ids: list[int], accept_lengths: list[int]) -> RequestOutput:
    metrics = RequestMetrics(num_verifies=len(accept_lengths), accept_lengths=accept_lengths)
    completion = CompletionOutput(0, "", token_ids, FinishReason.STOP)
    return RequestOutput("r", None, (1,), [completion], True, metrics)


LOOP = [1, 2, 3] * 30


def test_tokens_after_the_first_are_counted_and_loops_left_out():
    """8 tokens in 3 steps, of which the last is cut: 7 / 3; 5 in 2: 4 / 2; together 11 / 5."""
    outputs = [
        finished(list(range(8)), [4, 1, 3]),
        finished(list(range(5)), [2, 2]),
        finished(LOOP, [8] * 12),
        finished([9], []),
    ]
    result = acceptance_of(outputs, num_drafts=3)
    assert (result.num_prompts, result.num_looped) == (2, 1)
    assert (result.num_tokens, result.num_verifies) == (11, 5)
    assert result.mean_accept_length == 11 / 5
    assert result.median_accept_length == (7 / 3 + 2) / 2
    assert result.slots == (4 / 5, 2 / 5, 1 / 5)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="none of 2 answers is free of loops"):
        acceptance_of([finished(LOOP, [8] * 12), finished([9], [])], num_drafts=3)


def test_an_oracle_drafter_accepts_whole_blocks():
    """All 7 drafts right in each step: the engine's counts, through to the table."""
    engine = make_engine("scripted", accepts=7)
    prompts = [(3, 4, 5), (7, 8), (11, 12, 13)]
    result = measure_acceptance(engine, prompts, temperature=0.0, max_tokens=CONTEXT - 6)
    assert set(result.slots) == {1.0}
    assert result.num_prompts == 3
    none_right = make_engine("scripted", accepts=0)
    result = measure_acceptance(none_right, prompts, temperature=0.0, max_tokens=CONTEXT - 6)
    assert result.mean_accept_length == result.median_accept_length == 1.0
    assert set(result.slots) == {0.0}


def test_the_card_tables_what_was_measured():
    rows = [{"prompts": "chat", "T": 0, "accept length": 2.345}]
    facts = CardFacts(
        name="mine",
        target="smollm2-135m",
        drafter=DRAFTER,
        data={"model": "smollm2-135m"},
        settings={"loss": "decay"},
        num_parameters=12_280_704,
        steps=10,
        seconds=60.0,
        device="cpu",
        acceptance=rows,
    )
    card = model_card(facts)
    assert "| prompts | T | accept length |\n| --- | --- | --- |\n| chat | 0 | 2.35 |" in card
    assert "12.3 M parameters, 2 layers" in card
    assert "simulated" not in card
