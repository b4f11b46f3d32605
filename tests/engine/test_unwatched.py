"""Requests that nobody reads before their end: told once, and whole."""

import dataclasses

import pytest

from tests.fakes import PieceDetokenizer, letters
from tests.harness import check, expected, make_engine, request

LETTERS = letters()
ASKED = (
    request("a", [3, 1, 4], max_tokens=20, ignore_eos=True),
    request("b", [1], max_tokens=9),
    request("c", [2, 7], max_tokens=24, temperature=0.8, seed=3),
)


def text_engine(**options):
    return make_engine(make_detokenizer=lambda request: PieceDetokenizer(LETTERS), **options)


def unwatched(asked):
    return dataclasses.replace(asked, is_watched=False)


def spelled(tokens):
    return "".join(LETTERS[token].decode() for token in tokens)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_an_unwatched_request_is_told_once_with_its_whole_text(overlap):
    engine, told = text_engine(overlap=overlap), []
    for asked in ASKED:
        engine.add_request(unwatched(asked))
    while engine.has_unfinished:
        told += engine.step()
    assert sorted(output.request_id for output in told) == ["a", "b", "c"]
    outputs = {output.request_id: output for output in told}
    check(outputs, *ASKED)
    for asked in ASKED:
        plain = expected(asked)
        ended = plain.finish_reason == "stop"
        assert outputs[asked.request_id].outputs[0].text == spelled(plain[:-1] if ended else plain)


def test_watched_requests_beside_it_are_told_of_each_step():
    engine, told = text_engine(accepts=0), []
    engine.add_request(ASKED[0])
    engine.add_request(unwatched(ASKED[2]))
    while engine.has_unfinished:
        told += [output.request_id for output in engine.step()]
    assert told.count("a") == 20
    assert told.count("c") == 1


def test_an_unwatched_request_that_is_aborted_has_the_text_so_far():
    engine = text_engine(accepts=2)
    engine.add_request(unwatched(ASKED[0]))
    for _ in range(4):
        assert engine.step() == []
    output = engine.abort("a").outputs[0]
    assert 1 < len(output.token_ids) < 20
    assert output.token_ids == list(expected(ASKED[0]))[: len(output.token_ids)]
    assert output.text == spelled(output.token_ids)
    assert not engine.step()
