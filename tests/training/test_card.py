"""What a drafter's card says."""

from __future__ import annotations

from jaxspec.training.card import CardFacts, model_card
from tests.training.tiny import DRAFTER


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
    assert "12.3 M parameters, layers: 2 of" in card
    assert "simulated" not in card
