"""F22: log-probabilities of accepted rows, one entry a token that was put out, in order."""

import pytest

from tests.harness import check, check_logprobs, request, run
from tests.told import told_engine


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_logprobs_of_one_of_two_rows_with_accepts_3_and_0(overlap):
    """F22: then an empty cycle, whose result belongs to nobody, and the engine serves on."""
    told = request("told", [1, 2], max_tokens=14, ignore_eos=True, logprobs=2)
    plain = request("plain", [2, 5, 6, 7], max_tokens=9, ignore_eos=True)
    engine = told_engine(told, plain, accepts=(0, 3, 0, 3, 3), overlap=overlap)
    outputs = run(engine, told, plain)
    check(outputs, told, plain)
    check_logprobs(outputs["told"], told)
    lengths = outputs["told"].metrics.accept_lengths
    assert {1, 4} <= set(lengths), "both accepts occur"
    assert outputs["plain"].outputs[0].logprobs is None
    assert engine.step() == [], "an empty cycle"
    check_logprobs(run(engine, told)["told"], told)
