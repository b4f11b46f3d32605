"""Loops, copies and overlaps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.training.filters import SharedText, loop_start, ngram_hashes, text_key

FRESH = list(range(100, 160))


@pytest.mark.parametrize(
    ("token_ids", "start"),
    [
        (FRESH, None),
        ([], None),
        ([5] * 7, None),
        ([*FRESH, *[7] * 60], 61),
        ([*FRESH, *[1, 2, 3] * 20], 63),
        (FRESH + FRESH, 60),
        (FRESH + FRESH[:31], 60),
        (FRESH + FRESH[:30], None),
    ],
    ids=["fresh", "empty", "short", "one token", "three tokens", "all again", "31 again", "30"],
)
def test_a_loop_begins_at_its_first_repeated_token(token_ids, start):
    """24 8-grams on end that were there before are 31 repeated tokens."""
    assert loop_start(token_ids) == start


def test_hashes_differ_exactly_where_ngrams_do():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, 500)
    grams = [tuple(ids[i : i + 4]) for i in range(497)]
    hashes = ngram_hashes(ids, 4)
    assert len({*zip(grams, hashes.tolist(), strict=True)}) == len(set(grams)) == len({*hashes})
    assert len(ngram_hashes([1, 2], 4)) == 0


def test_texts_that_differ_only_in_form_are_the_same():
    assert text_key("What is  the Moon?") == text_key("what is the moon") == "what is the moon"
    assert text_key("What is a moon?") != text_key("What is the moon?")


def test_thirteen_shared_tokens_are_an_overlap_and_twelve_are_not():
    held_out = list(range(20))
    shared = SharedText([("a text of twenty tokens", held_out)])
    assert shared.holds("another", [99, *held_out[4:17], 98])
    assert not shared.holds("another", [99, *held_out[4:16], 98])


def test_a_short_held_out_text_is_found_whole():
    shared = SharedText([("What is bread?", [1, 2, 3, 4])])
    assert shared.holds("what is BREAD", [9, 9])
    assert not shared.holds("What is bread made of?", [1, 2, 3, 5, 6])
    assert not SharedText([]).holds("What is bread?", [1, 2, 3, 4])
