"""Stop strings end a request wherever they stand, and streams never take text back."""

import itertools

import pytest

from tests.fakes import EOS, PieceDetokenizer, letters
from tests.harness import BLOCK, expected, make_engine, request, run, tokens_of

PROMPT = [3, 1, 4]
LENGTH = 20
PLAIN = list(expected(request("a", PROMPT, max_tokens=LENGTH, ignore_eos=True)))
TEXT = b"".join(letters()[token] for token in PLAIN).decode()


def asked(name="a", **params):
    return request(name, PROMPT, max_tokens=LENGTH, ignore_eos=True, **params)


def text_engine(pieces=None, **options):
    pieces = letters() if pieces is None else pieces
    return make_engine(make_detokenizer=lambda _: PieceDetokenizer(pieces), **options)


@pytest.mark.parametrize("drafter", ["none", "scripted"])
@pytest.mark.parametrize("size", [1, 2, 3, BLOCK + 1])
@pytest.mark.parametrize("start", range(0, LENGTH - BLOCK, 3))
def test_a_stop_string_at_any_place_ends_the_request(start, size, drafter):
    """Inside a block, across two, and longer than one; also the metrics stop there."""
    stop = TEXT[start : start + size]
    end = TEXT.find(stop) + size
    completion = (output := run(text_engine(drafter=drafter), asked(stop=stop))["a"]).outputs[0]
    assert completion.token_ids == PLAIN[:end]
    assert completion.text == TEXT[: end - size]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert output.metrics.num_committed == end - 1


def test_a_stop_string_can_be_kept_in_the_text():
    stop = TEXT[4:6]
    output = run(text_engine(), asked(stop=stop, include_stop_str_in_output=True))["a"]
    assert output.outputs[0].text == TEXT[: TEXT.find(stop) + 2]


def test_rows_beside_one_with_stop_strings_go_on():
    outputs = run(text_engine(), asked("a", stop=TEXT[2:4]), asked("b"), asked("c", stop=TEXT[7:9]))
    assert tokens_of(outputs["b"]) == PLAIN
    assert outputs["b"].outputs[0].text == TEXT
    assert tokens_of(outputs["c"]) == PLAIN[: TEXT.find(TEXT[7:9]) + 2]


@pytest.mark.parametrize("stop", [(), TEXT[9:12], (TEXT[-3:], TEXT[5:9])], ids=["none", "1", "2"])
def test_streamed_text_only_grows_and_ends_as_the_whole(stop):
    engine = text_engine(accepts=1)
    engine.add_request(asked(stop=stop))
    texts = []
    while engine.has_unfinished:
        texts += [output.outputs[0].text for output in engine.step()]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    whole = run(text_engine(accepts=7), asked(stop=stop))["a"].outputs[0].text
    assert texts[-1] == whole


def split_characters():
    """Pieces in which the tokens at 4, 5 and 6 of the plain output make x, two euro signs, y."""
    first, second, third = PLAIN[4:7]
    assert len({first, second, third}) == 3
    return {
        **letters(),
        first: b"x\xe2\x82",
        second: b"\xac\xe2",
        third: b"\x82\xacy",
    }


def plain_text(pieces, count):
    return b"".join(pieces[token] for token in PLAIN[:count]).decode("utf-8", "replace")


@pytest.mark.parametrize("accepts", [0, 7], ids=["a token a step", "many"])
@pytest.mark.parametrize(("stop", "count"), [("x€", 6), ("€€", 7), ("€y", 7)], ids=str)
def test_a_stop_string_ends_inside_characters_of_several_tokens(stop, count, accepts):
    pieces = split_characters()
    output = run(text_engine(pieces, accepts=accepts), asked(stop=stop))["a"].outputs[0]
    assert output.token_ids == PLAIN[:count]
    assert output.text == plain_text(pieces, count).split(stop)[0]
    assert output.stop_reason == stop


def test_half_a_character_is_never_streamed():
    pieces = split_characters()
    engine = text_engine(pieces, accepts=0)
    engine.add_request(asked())
    texts = []
    while engine.has_unfinished:
        texts += [output.outputs[0].text for output in engine.step()]
    final = plain_text(pieces, LENGTH)
    assert texts[-1] == final
    assert all(final.startswith(text) for text in texts)


def test_the_text_of_a_stop_id_is_left_out():
    eos_at = next(i for i in range(32) if EOS in expected(request("e", [i], max_tokens=LENGTH)))
    each = request("e", [eos_at], max_tokens=LENGTH)
    output = run(text_engine(), each)["e"].outputs[0]
    assert output.token_ids[-1] == EOS
    assert output.text == b"".join(letters()[t] for t in output.token_ids[:-1]).decode()
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)
