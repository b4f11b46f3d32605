"""Drafts without noise: the same text at any temperature, and fewer of them are right."""

import pytest

from tests.harness import check, make_engine, request, run


@pytest.mark.nightly
@pytest.mark.parametrize("accept_rule", ["keyed", "rejection"])
def test_drafts_without_noise_change_accept_lengths_alone(accept_rule):
    """The scripted drafter knows the target's logits; only with its noise are 7 of 7 right."""
    asked = [
        request(f"r{i}", [i + 1] * 3, temperature=1.0, seed=i, max_tokens=17, ignore_eos=True)
        for i in range(3)
    ]
    lengths = {}
    for noise in ("keyed", "none"):
        engine = make_engine(accepts=7, draft_noise=noise, accept_rule=accept_rule)
        outputs = run(engine, *asked)
        if accept_rule == "keyed":
            check(outputs, *asked)
        lengths[noise] = [n for each in outputs.values() for n in each.metrics.accept_lengths]
    assert set(lengths["keyed"]) == {8} or accept_rule == "rejection"
    assert max(lengths["none"]) < 8 and sum(lengths["none"]) / len(lengths["none"]) < 4
