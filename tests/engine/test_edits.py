"""Penalties, bias, min_tokens and bad words: the text of plain decoding, inside blocks too."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.drafters.tree import ancestors
from jaxspec.engine.admission import bad_word_ids
from jaxspec.logit_edits import preceding_in_chain, preceding_in_tree
from jaxspec.mode import Mode
from jaxspec.request import RequestError
from tests.fakes import EOS, LetterTokenizer, letters
from tests.harness import (
    SCRIPT,
    check,
    expected,
    make_engine,
    record,
    request,
    run,
    tokens_of,
)
from tests.told import check_told_lengths, told_engine

CHAIN = jnp.tril(jnp.ones((1, 6, 6), bool))
NAMES = [letter.decode() for letter in letters().values()]
EDITS = [
    dict(frequency_penalty=0.75),
    {},
    dict(presence_penalty=1.5, temperature=0.9),
    dict(repetition_penalty=1.5),
    dict(repetition_penalty=0.5, frequency_penalty=-0.5),
    dict(logit_bias={5: 4.0, 9: -100.0, 0: 2.5}, temperature=1.2, top_k=4),
    dict(min_tokens=8, stop_token_ids=[7, 11, 19], logit_bias={7: 9.0}),
    dict(bad_words=(*NAMES[4:20:3], "ab", "c1"), logit_bias={0: 6.0, 1: 6.0}),
    dict(temperature=0.7, top_p=0.9),
    dict(
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        min_tokens=5,
        logit_bias={3: 3.0, EOS: 8.0},
        bad_words=("d",),
        temperature=1.0,
        min_p=0.05,
    ),
]


def workload():
    """More requests than slots, with prompts of a tile and of several dispatches, in any mix."""
    asked = []
    for i, edits in enumerate(EDITS):
        prompt = [i, *((i * 5 + j * 3 + 1) % 32 for j in range((3, 0, 7, 18)[i % 4]))]
        params = {"max_tokens": (14, None)[i % 2], "seed": i, **edits}
        params["ignore_eos"] = "min_tokens" not in edits
        asked.append(request(f"r{i}", prompt, **params))
    return asked


def test_each_edit_changes_the_text():
    """Else the tests below would prove nothing of it."""
    for each, edits in zip(workload(), EDITS, strict=True):
        if not each.params.mode.edits:
            continue
        kept = ("temperature", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos")
        same = {name: getattr(each.params, name) for name in kept}
        plain = request("p", each.prompt_token_ids, max_tokens=14, **same)
        assert list(expected(plain)) != list(expected(each))[:14], edits


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("accepts", [0, 7, SCRIPT], ids=str)
def test_every_mix_of_edits_gives_the_text_of_plain_decoding(accepts, overlap):
    """F23: right drafts are all accepted, so each position counts the drafts before it."""
    asked = workload()
    outputs = run(told_engine(*asked, accepts=accepts, overlap=overlap), *asked)
    check(outputs, *asked)
    check_told_lengths(outputs, asked, accepts)


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted", "random", "tree"])
def test_edits_with_every_drafter(drafter, overlap):
    asked = workload()
    check(run(make_engine(drafter, overlap=overlap), *asked), *asked)


@pytest.mark.nightly
def test_64_bit_types_change_no_edit():
    asked = workload()
    want = {each.request_id: list(expected(each)) for each in asked}
    with jax.enable_x64(True):
        outputs = run(told_engine(*asked), *asked)
    assert {name: tokens_of(output) for name, output in outputs.items()} == want


def test_a_slot_keeps_no_edits_of_its_last_owner():
    """A plain row beside an edited one, in the slot where another was edited before."""
    asked = [each for each in workload() if each.params.mode.edits][:4]
    plain = request("plain", [20, 3, 5], ignore_eos=True)
    engine = told_engine(*asked, plain)
    check(run(engine, *asked[:3]), *asked[:3])
    check(run(engine, plain, asked[3]), plain, asked[3])


def test_only_batches_with_an_edited_row_run_the_programs_of_edits():
    edited = request("e", [1, 2], max_tokens=20, ignore_eos=True, frequency_penalty=1.0)
    plain = request("p", [2, 3], max_tokens=3, ignore_eos=True)
    engine = told_engine(edited, plain)
    calls = record(engine)
    run(engine, plain)
    assert engine._programs.edits is None, "rows of edits take no memory before somebody needs them"
    assert {call.mode for call in calls} == {Mode.GREEDY}
    calls.clear()
    run(engine, plain, edited)
    assert {call.mode for call in calls} == {Mode.EDITED}
    calls.clear()
    check(run(engine, plain), plain)
    assert {call.mode for call in calls} == {Mode.GREEDY}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            dict(logit_bias={1: 1.0, 32: 1.0}),
            "logit_bias names token id 32, which is outside the vocabulary; ids are 0 to 31",
        ),
        (
            dict(bad_words=["ab", "abcdefghi"]),
            "bad_words holds 'abcdefghi', which is 9 tokens; each may have 8 at most",
        ),
        (
            dict(bad_words=[a + b for a in NAMES[:9] for b in NAMES[:8]]),
            "bad_words are 72 token sequences; at most 64 are possible",
        ),
    ],
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_edits_that_no_slot_holds_are_refused(edit, message):
    with pytest.raises(RequestError, match="^" + re.escape(message) + "$"):
        make_engine().add_request(request("a", [1], **edit))


def test_bad_words_need_a_tokenizer():
    engine = make_engine()
    engine._tokenizer = None
    message = "bad_words is ('x',), which needs a tokenizer; give the engine one"
    with pytest.raises(RequestError, match="^" + re.escape(message) + "$"):
        engine.add_request(request("a", [1], bad_words="x"))


def test_a_bad_word_that_is_no_text_is_refused():
    class Strict(LetterTokenizer):
        def encode(self, text, *, add_special_tokens):
            return list(text.encode())

    with pytest.raises(RequestError, match=r"^bad_words holds '\\ud800', which is no text: "):
        bad_word_ids(("\ud800",), Strict())


def test_more_min_tokens_than_an_int32_last_to_the_models_limit():
    asked = request("a", [1, 2], max_tokens=None, min_tokens=2**31)
    output = run(make_engine(), asked)["a"]
    length = len(asked.prompt_token_ids) + len(tokens_of(output))
    assert length == make_engine().geometry.max_model_len


def test_a_bad_word_is_meant_with_and_without_a_space_before_it():
    class Spelling(LetterTokenizer):
        def encode(self, text, *, add_special_tokens):
            return {"ab": [1, 2], " ab": [3], "c": [4], " c": [4]}[text]

    assert bad_word_ids((" ab", "c"), Spelling()) == [(1, 2), (3,), (4,)]


@pytest.mark.nightly
def test_a_batch_in_which_no_token_is_allowed_ends_in_an_error():
    """Rather than in a token that was forbidden."""
    asked = request("a", [1, 2], bad_words=NAMES)
    output = run(make_engine("none"), asked)["a"]
    assert output.outputs[0].finish_reason == "error"
    assert tokens_of(output) == []


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_edits_outlive_preemption_and_cached_prompts(caching):
    """Counts are those of prompt and output, whatever of them was prefilled, and how often."""
    asked = [
        request(f"r{i}", [i + 1, 5, 9, 9, 4], max_tokens=None, ignore_eos=True, seed=i, **edit)
        for i, edit in enumerate([EDITS[0], EDITS[3], EDITS[9]])
    ]
    again = [request(f"again {each.request_id}", each.prompt_token_ids) for each in asked]
    again = [replace(each, params=first.params) for each, first in zip(again, asked, strict=True)]
    engine = told_engine(*asked, accepts=3, prefix_caching=caching)
    engine._use_pool(PagePool(16))
    outputs = {**run(engine, *asked), **run(engine, *again)}
    check(outputs, *asked, *again)
    assert engine.stats.num_preemptions >= 1
    assert any(output.num_cached_tokens for output in outputs.values()) == caching


def test_what_stands_before_the_nodes_of_a_tree():
    """Parents -1 0 0 1 3 2: node 4 stands behind 0, 1 and 3; the root is in the row's counts."""
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 15]])
    parents = jnp.asarray([[-1, 0, 0, 1, 3, 2]], jnp.int32)
    tail = jnp.asarray([[1, 2, 10]], jnp.int32)
    before = preceding_in_tree(tokens, parents, ancestors(parents), tail)
    assert before.tails[0].tolist() == [
        [1, 2, 10],
        [2, 10, 11],
        [2, 10, 12],
        [10, 11, 13],
        [11, 13, 14],
        [10, 12, 15],
    ]
    counted = [np.flatnonzero(row).tolist() for row in np.asarray(before.counted[0])]
    assert counted == [[], [1], [2], [1, 3], [1, 3, 4], [2, 5]]
    chain = preceding_in_tree(tokens, jnp.asarray([[-1, 0, 1, 2, 3, 4]], jnp.int32), CHAIN, tail)
    for of_tree, of_chain in zip(chain, preceding_in_chain(tokens, tail), strict=True):
        assert of_tree.tolist() == of_chain.tolist()
