"""F1, F2: stop ids and limits inside an accepted block; nothing after them is returned."""

import pytest

from jaxspec.request import FinishReason
from tests.fakes import EOS
from tests.harness import expected, make_engine, request, run, tokens_of

LENGTH = 20


def plain(prompt):
    return list(expected(request("p", prompt, max_tokens=LENGTH, ignore_eos=True)))


def prompt_whose_tokens_differ(count):
    """A prompt whose first `count` output tokens are distinct, so that each stops at its place."""
    prompts = ([i, j] for i in range(32) for j in range(32))
    return next(
        prompt
        for prompt in prompts
        if len(set(plain(prompt)[:count])) == count and EOS not in plain(prompt)
    )


PROMPT = prompt_whose_tokens_differ(10)
PLAIN = plain(PROMPT)


def streamed(engine, asked):
    """(token ids seen step by step, the last output)."""
    engine.add_request(asked)
    seen, last = [], None
    while engine.has_unfinished:
        for last in engine.step():
            assert tokens_of(last)[: len(seen)] == seen
            seen = tokens_of(last)
    return seen, last


@pytest.mark.parametrize("index", range(9))
def test_a_stop_id_at_each_offset_of_an_accepted_block(index):
    """F1: index 0 is the prefill's token, 1 to 7 stand among the drafts, 8 is the bonus token."""
    asked = request("a", PROMPT, max_tokens=LENGTH, stop_token_ids=[PLAIN[index]])
    seen, last = streamed(make_engine(accepts=7), asked)
    assert seen == PLAIN[: index + 1]
    assert last.outputs[0].finish_reason is FinishReason.STOP
    assert last.outputs[0].stop_reason == PLAIN[index]


def test_ignored_eos_stops_nothing():
    """F1."""
    prompt = next([i] for i in range(32) if EOS in plain([i])[1:9])
    asked = request("a", prompt, max_tokens=LENGTH, ignore_eos=True)
    assert tokens_of(run(make_engine(accepts=7), asked)["a"]) == plain(prompt)


@pytest.mark.parametrize(
    ("limit", "count", "reason"),
    [(6, 4, "stop"), (2, 2, "length"), (4, 4, "stop"), (3, 3, "length"), (9, 4, "stop")],
    ids=str,
)
def test_of_stop_and_limit_in_one_block_the_earlier_counts(limit, count, reason):
    """F2: the stop id is the 4th token, inside the first block."""
    asked = request("a", PROMPT, max_tokens=limit, stop_token_ids=[PLAIN[3]])
    output = run(make_engine(accepts=7), asked)["a"]
    assert tokens_of(output) == PLAIN[:count]
    assert output.outputs[0].finish_reason == reason


@pytest.mark.parametrize("limit", [1, 8, 9, 10, 17])
def test_a_limit_at_and_around_a_blocks_end(limit):
    """F2: blocks end at 9 and 17 tokens."""
    output = run(make_engine(accepts=7), request("a", PROMPT, max_tokens=limit, ignore_eos=True))
    assert tokens_of(output["a"]) == PLAIN[:limit]
    assert output["a"].outputs[0].finish_reason is FinishReason.LENGTH
