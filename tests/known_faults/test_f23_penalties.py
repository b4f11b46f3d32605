"""F23: penalties, bias, min_tokens and min_p count inside a block that is verified at once."""

import numpy as np
import pytest

from tests import oracle
from tests.harness import expected, request, run, tokens_of
from tests.told import told_engine

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("accepts", [7, 0], ids=["one block", "a token a step"])
@pytest.mark.parametrize(
    "edit",
    [
        dict(frequency_penalty=2.0),
        dict(presence_penalty=2.0),
        dict(repetition_penalty=4.0),
        dict(logit_bias={7: -9.0}),
        dict(min_tokens=7, stop_token_ids=[7], max_tokens=14),
        dict(min_p=0.4, temperature=2.0, seed=4, frequency_penalty=2.0),
    ],
    ids=str,
)
def test_a_target_that_repeats_a_token_is_penalised_token_by_token(edit, accepts):
    """F23: token 7 is likeliest everywhere by a bias, and frequency_penalty=2 wears it down."""
    bias = {7: 12.0, **edit.get("logit_bias", {})}
    rest = {name: value for name, value in edit.items() if name != "logit_bias"}
    asked = request("a", PROMPT, **{"ignore_eos": True, "max_tokens": 14, **rest}, logit_bias=bias)
    plain = request("a", PROMPT, max_tokens=14, ignore_eos=True, logit_bias={7: 12.0})
    assert list(expected(plain))[:8].count(7) >= 6, "the target repeats itself"
    assert list(expected(asked)) != list(expected(plain))
    output = run(told_engine(asked, accepts=accepts), asked)["a"]
    assert tokens_of(output) == list(expected(asked))
    if accepts:
        assert output.metrics.accept_lengths[0] == 8, "the drafts were right, all in one block"


def test_the_oracle_wears_a_token_down():
    """2 a time for frequency, 2 once for presence, the fourth part for repetition."""
    logits = np.array([8.0, 4.0, -1.0, 0.0], np.float32)
    asked = request(
        "a", PROMPT, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=4.0
    )
    edited = oracle.edited_logits(logits, [2, 1, 1, 0], 1, asked.params, ())
    assert edited.tolist() == [8 / 4 - 2 - 1, 4 / 4 - 2 * 2 - 1, -4.0, 0.0]
