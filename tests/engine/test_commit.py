"""From committed tokens to text and its end."""

import pytest

from jaxspec.engine.commit import commit_tokens
from jaxspec.engine.sequence import Sequence
from jaxspec.request import FinishReason, Request, RequestMetrics, SamplingParams
from tests.fakes import PieceDetokenizer

PIECES = {i: text for i, text in enumerate([b"a", b"b", b"c,", b"zz", b"z", b"d"])}
PIECES |= {10: b"x\xe2\x82", 11: b"\xac", 12: b"\xacy", 13: b"\xe2"}
EOS = 9


def sequence(**params):
    request = Request("r", (1, 2), SamplingParams(**params))
    return Sequence(
        request,
        99,
        None,
        RequestMetrics(),
        None,
        frozenset([EOS]),
        detokenizer=PieceDetokenizer(PIECES),
    )


def commit(seq, tokens, *, finished=False):
    commit_tokens(seq, tokens, finished=finished)
    seq.catch_up()
    return seq.output_ids, seq.text, seq.finish_reason, seq.stop_reason


def test_tokens_become_text():
    seq = sequence()
    assert commit(seq, [0, 1]) == ([0, 1], "ab", None, None)
    assert commit(seq, [2]) == ([0, 1, 2], "abc,", None, None)


def test_a_stop_id_ends_the_request_and_has_no_text():
    assert commit(sequence(), [0, EOS], finished=True) == ([0, EOS], "a", "stop", EOS)


def test_a_full_request_ends_by_length():
    assert commit(sequence(), [0, 1], finished=True) == ([0, 1], "ab", "length", None)


def test_without_a_detokenizer_there_is_no_text():
    seq = sequence()
    seq.detokenizer = None
    assert commit(seq, [0, EOS], finished=True) == ([0, EOS], "", "stop", EOS)


@pytest.mark.parametrize(
    ("stop", "tokens", "ids", "text", "reason"),
    [
        # F19: "c," is complete before "b" and "zz", whatever the order of the list.
        (["zz", "b", "c,"], [0, 2, 1, 3], [0, 2], "a", "c,"),
        (["c,", "b", "zz"], [0, 2, 1, 3], [0, 2], "a", "c,"),
        (["zz", "b", "c,"], [0, 3, 1, 2], [0, 3], "a", "zz"),
        # Both complete with one token: the one that begins first goes.
        (["z", "az", "zz"], [0, 4, 4], [0, 4], "", "az"),
        # Two tokens make one stop string.
        (["zz"], [4, 0, 4, 4, 1], [4, 0, 4, 4], "za", "zz"),
        # The stop string ends inside a token's text: what the token has more goes too.
        (["c"], [0, 2, 1], [0, 2], "a", "c"),
    ],
    ids=str,
)
def test_the_stop_string_complete_first_ends_the_request(stop, tokens, ids, text, reason):
    assert commit(sequence(stop=stop), tokens) == (ids, text, "stop", reason)


def test_a_stop_string_can_be_kept():
    seq = sequence(stop="bc", include_stop_str_in_output=True)
    assert commit(seq, [0, 1, 2, 0]) == ([0, 1, 2], "abc", "stop", "bc")


def test_a_stop_string_across_two_steps_is_found():
    seq = sequence(stop="bc,")
    assert commit(seq, [0, 1]) == ([0, 1], "ab", None, None)
    assert seq.settled_text() == "a", "what may be the beginning of a stop string is held back"
    assert commit(seq, [2, 5]) == ([0, 1, 2], "a", "stop", "bc,")
    assert seq.settled_text() == "a"


def test_text_that_turned_out_harmless_is_let_go():
    seq = sequence(stop="bc,")
    commit(seq, [0, 1])
    commit(seq, [5])
    assert seq.settled_text() == "abd"


def test_held_back_text_comes_at_the_end():
    seq = sequence(stop="bc,")
    commit(seq, [0, 1], finished=True)
    assert (seq.settled_text(), seq.finish_reason) == ("ab", FinishReason.LENGTH)


def test_a_character_of_two_tokens_comes_whole():
    seq = sequence()
    assert commit(seq, [10])[1] == "x"
    assert commit(seq, [11])[1] == "x€"


@pytest.mark.parametrize(("tokens", "ids"), [([10, 11, 0], [10, 11]), ([0, 10, 12], [0, 10, 12])])
def test_a_stop_string_may_be_a_character_of_two_tokens(tokens, ids):
    seq = sequence(stop="€")
    assert commit(seq, tokens)[0] == ids
    assert seq.text == ("x" if len(ids) == 2 else "ax")


def test_an_unfinished_character_shows_at_the_end_only():
    seq = sequence()
    assert commit(seq, [0, 13])[1] == "a"
    assert commit(seq, [10], finished=True)[1] == "a\ufffdx\ufffd"


def test_a_stop_string_in_the_last_held_back_text_ends_the_request():
    seq = sequence(stop="\ufffd")
    assert commit(seq, [0, 13], finished=True) == ([0, 13], "a", "stop", "\ufffd")


@pytest.mark.parametrize(
    ("min_tokens", "ids", "text"),
    [
        (0, [0, 3], "a"),
        (1, [0, 3], "a"),
        (2, [0, 3, 1, 4, 4], "azzb"),
        (3, [0, 3, 1, 4, 4], "azzb"),
        (5, [0, 3, 1, 4, 4, 5, 3], "azzbzzd"),
    ],
)
def test_a_stop_string_that_ends_before_min_tokens_does_not_count(min_tokens, ids, text):
    seq = sequence(stop="zz", min_tokens=min_tokens)
    assert commit(seq, [0, 3, 1, 4, 4, 5, 3]) == (ids, text, "stop", "zz")


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    assert commit(sequence(stop="zz", min_tokens=1), [4, 4, 0]) == ([4, 4], "", "stop", "zz")
