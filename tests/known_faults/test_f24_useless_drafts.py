"""F24: a drafter that loads but never guesses right says so, once, with its figures."""

import pytest

from tests.harness import make_engine, request, run


@pytest.mark.parametrize(("accepts", "warnings"), [(0, 1), (3, 0)], ids=["useless", "useful"])
def test_a_drafter_that_is_hardly_ever_right_is_reported_once(accepts, warnings, caplog):
    engine = make_engine("scripted", accepts=accepts, expected_accept_length=1.2)
    for index in range(20):
        run(engine, request(str(index), [5, 6, index], ignore_eos=True, max_tokens=20))
    assert engine.stats.num_verifies > 64
    assert len(caplog.records) == warnings
    if warnings:
        assert caplog.records[0].getMessage() == (
            "mean accept length is 1.00 after 64 verify steps, below 1.2; check that the drafter "
            "was made for this model, or use --drafter none"
        )
