"""F19: of several stop strings in one block the earliest to complete ends the request."""

import pytest

from tests.fakes import PieceDetokenizer, letters
from tests.harness import check_logprobs, expected, make_engine, request, run, tokens_of


def plain(prompt):
    return list(expected(request("a", prompt, max_tokens=12, ignore_eos=True)))


# A prompt whose first seven output tokens are distinct.
PROMPT = next([i] for i in range(32) if len(set(plain([i])[:7])) == 7)
PLAIN = plain(PROMPT)
# Tokens 2 to 6 of the output stand in the first block of eight.
PIECES = {
    **letters(),
    PLAIN[2]: b"c",
    PLAIN[3]: b",",
    PLAIN[4]: b"b",
    PLAIN[5]: b"z",
    PLAIN[6]: b"z",
}


@pytest.mark.parametrize("accepts", [7, 0], ids=["one block", "a token a step"])
@pytest.mark.parametrize("stop", [["zz", "b", "c,"], ["b", "c,", "zz"]], ids=str)
def test_stop_text_ids_and_usage_agree(stop, accepts):
    """F19: whatever the order of the list, streaming or not."""
    engine = make_engine(accepts=accepts, make_detokenizer=lambda _: PieceDetokenizer(PIECES))
    asked = request("a", PROMPT, max_tokens=12, ignore_eos=True, stop=stop)
    engine.add_request(asked)
    streamed = []
    while engine.has_unfinished:
        streamed += [output.outputs[0].text for output in engine.step()]
    output = run(engine, asked)["a"]
    completion = output.outputs[0]
    assert completion.stop_reason == "c,"
    assert tokens_of(output) == PLAIN[:4]
    assert completion.text == streamed[-1] == b"".join(PIECES[t] for t in PLAIN[:2]).decode()
    assert output.metrics.num_committed == 3


@pytest.mark.nightly
@pytest.mark.parametrize("accepts", [7, 0], ids=["one block", "a token a step"])
def test_logprobs_end_with_the_ids(accepts):
    """F19: an entry for each id that is left, none of the tail."""
    engine = make_engine(accepts=accepts, make_detokenizer=lambda _: PieceDetokenizer(PIECES))
    asked = request("a", PROMPT, max_tokens=12, ignore_eos=True, stop=["zz", "b", "c,"], logprobs=1)
    output = run(engine, asked)["a"]
    assert tokens_of(output) == PLAIN[:4]
    check_logprobs(output, asked)
