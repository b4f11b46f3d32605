"""Raw sums and the ratios made from them."""

import pytest

from jaxspec.bench.metrics import (
    Sums,
    acceptance_by_position,
    acceptance_rate,
    decode_tokens_per_s,
    figures_line,
    histogram,
    kernels_text,
    mean_accept_length,
    request_figures,
)
from jaxspec.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput


def output(num_tokens=5, **metrics):
    times = dict(arrival_s=10.0, first_token_s=10.5, finished_s=12.5)
    completion = CompletionOutput(0, "text", list(range(num_tokens)), FinishReason.LENGTH)
    return RequestOutput(
        "0", None, (1, 2, 3), [completion], True, RequestMetrics(**{**times, **metrics})
    )


def test_sums_add_up_and_do_not_follow_the_engine():
    counts = RequestMetrics(num_verifies=2, num_draft_tokens=14, num_accepted=3, num_committed=5)
    sums = Sums.of(counts)
    counts.num_verifies = 99
    assert sums == Sums(2, 14, 3, 5)
    assert sums.plus(Sums(1, 7, 7, 8)) == Sums(3, 21, 10, 13)


def test_the_mean_accept_length_counts_the_bonus():
    assert mean_accept_length(Sums(num_verifies=4, num_accepted=6)) == 2.5
    assert mean_accept_length(Sums()) is None


def test_the_acceptance_rate_is_of_the_drafts():
    assert acceptance_rate(Sums(num_draft_tokens=28, num_accepted=7)) == 0.25
    assert acceptance_rate(Sums(num_verifies=3)) is None


def test_the_histogram_is_in_the_order_of_the_lengths():
    assert list(histogram([3, 1, 8, 1]).items()) == [(1, 2), (3, 1), (8, 1)]


def test_acceptance_by_position_counts_the_drafts_that_were_reached():
    """F31: seven verifies of three drafts; two accepted none, one accepted one, four all."""
    assert acceptance_by_position({1: 2, 2: 1, 4: 4}, 3) == (5 / 7, 4 / 5, 1.0)
    assert acceptance_by_position({1: 3}, 2) == (0.0, None)
    assert acceptance_by_position({}, 0) == ()


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 2.0),  # the first of five tokens came before the two seconds
        ({"num_tokens": 1}, None),
        ({"first_token_s": None}, None),
        ({"finished_s": None}, None),
        ({"finished_s": 10.5}, None),
    ],
)
def test_the_rate_leaves_the_first_token_out(changes, rate):
    assert decode_tokens_per_s(output(**changes)) == rate


def test_figures_hold_raw_sums_and_ratios():
    figures = request_figures(
        output(
            num_verifies=2,
            num_draft_tokens=14,
            num_accepted=2,
            num_committed=4,
            accept_lengths=[1, 3],
        )
    )
    assert figures == {
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_tokens": 5,
        "time_to_first_token_s": 0.5,
        "duration_s": 2.5,
        "tokens_per_s": 2.0,
        "num_verifies": 2,
        "num_draft_tokens": 14,
        "num_accepted": 2,
        "num_committed": 4,
        "mean_accept_length": 2.0,
        "accept_lengths": {1: 1, 3: 1},
    }
    assert request_figures(output(finished_s=None))["duration_s"] is None


def test_the_line_of_figures_leaves_out_what_is_not_known():
    kernels = {"accept": "xla", "kv_write": "xla"}
    full = figures_line(output(num_verifies=2, num_accepted=2), drafter="ngram", kernels=kernels)
    assert full == (
        "5 tokens, 2.0 tokens/s, first token 0.50 s, mean accept length 2.00, drafter ngram, "
        "kernels xla"
    )
    short = figures_line(output(num_tokens=0, first_token_s=None), drafter="none", kernels=kernels)
    assert short == "0 tokens, drafter none, kernels xla"


def test_kernels_are_named_one_by_one_where_they_differ():
    assert kernels_text({"accept": "xla", "kv_write": "triton"}) == "accept=xla kv_write=triton"
