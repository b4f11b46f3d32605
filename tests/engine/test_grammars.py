"""Grammars restrict every position of a block, beside rows that have none."""

import itertools
import json
import re

import numpy as np
import pytest

pytest.importorskip("llguidance")

from jaxspec.bench.compilations import count_compilations
from jaxspec.cache.page_pool import PagePool
from jaxspec.engine.allowed import allowed_tokens
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.request import FinishReason, RequestError, SamplingParams, StructuredOutputsParams
from tests.fakes import EOS, encode_letters, letter_grammars
from tests.harness import (
    SCRIPT,
    check,
    check_logprobs,
    make_engine,
    record,
    request,
    run,
    tokens_of,
)
from tests.oracle import AUTOMATA
from tests.told import check_told_lengths, told_engine

REGEXES = [StructuredOutputsParams(regex=regex) for regex in AUTOMATA]
ASKED = [
    dict(structured_outputs=REGEXES[0]),
    dict(),
    dict(structured_outputs=REGEXES[1], temperature=1.0, seed=4),
    dict(temperature=0.8, top_p=0.9, seed=1),
    dict(structured_outputs=REGEXES[0], frequency_penalty=2.0, logprobs=1),
    dict(structured_outputs=REGEXES[2], logit_bias={0: 4.0}, temperature=0.7, seed=2),
    dict(frequency_penalty=1.0),
]


def workload():
    asked = []
    for i, params in enumerate(ASKED):
        prompt = [i + 3, *((i * 5 + j * 3) % 32 for j in range((3, 0, 7, 19)[i % 4]))]
        asked.append(request(f"r{i}", prompt, max_tokens=11, **params))
    return asked


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("accepts", [0, 7, SCRIPT], ids=str)
def test_every_mix_gives_the_text_of_plain_decoding(accepts, overlap):
    """Right drafts are accepted to the end of a block, which needs the masks of all positions."""
    asked = workload()
    outputs = run(told_engine(*asked, accepts=accepts, overlap=overlap), *asked)
    check(outputs, *asked)
    for each in asked:
        check_logprobs(outputs[each.request_id], each)
    check_told_lengths(outputs, asked, accepts)


def test_answers_are_whole_where_there_is_room():
    asked = [
        request(f"r{i}", [i + 3, 7], max_tokens=None, structured_outputs=REGEXES[i % 3])
        for i in range(6)
    ]
    outputs = run(told_engine(*asked), *asked)
    check(outputs, *asked)
    for each in asked:
        tokens = tokens_of(outputs[each.request_id])
        if outputs[each.request_id].outputs[0].finish_reason == "stop":
            assert tokens[-1] == EOS
            text = "".join("ab?def"[token] for token in tokens[:-1])
            assert re.fullmatch(each.params.structured_outputs.regex, text)
    reasons = [outputs[each.request_id].outputs[0].finish_reason for each in asked]
    assert reasons.count("stop") >= 2


def test_a_preempted_request_goes_on_inside_its_grammar():
    asked = [
        request(
            f"r{i}",
            [i + 3, 5, 9],
            max_tokens=None,
            structured_outputs=REGEXES[0],
            logit_bias={5: -50.0},
        )
        for i in range(3)
    ]
    engine = told_engine(*asked, accepts=3)
    engine._use_pool(PagePool(16))
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert engine.stats.num_preemptions >= 1


def test_a_grammar_whose_every_token_is_a_bad_word_ends_its_request_alone():
    asked = request("a", [3], structured_outputs=REGEXES[0], bad_words=["b", "e"], max_tokens=9)
    other = workload()[0]
    outputs = run(told_engine(other), asked, other)
    check({other.request_id: outputs[other.request_id]}, other)
    assert outputs["a"].outputs[0].finish_reason is FinishReason.ERROR
    assert len(tokens_of(outputs["a"])) == 1  # an a or a d
    assert outputs["a"].error.endswith("; or bad_words forbid all that the grammar allows")


def test_only_batches_with_a_grammar_run_its_programs():
    plain, bound = workload()[1], workload()[0]
    engine = told_engine(plain, bound)
    calls = record(engine)
    check(run(engine, plain), plain)
    assert {call.mode for call in calls} == {Mode.GREEDY}


@pytest.mark.nightly
def test_nothing_compiles_after_the_warm_up_of_grammars():
    asked = workload()
    engine = told_engine(*asked)
    warmup(engine, modes=tuple(Mode))
    with count_compilations() as count:
        outputs = run(engine, *asked)
    assert count.count == 0
    check(outputs, *asked)


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted", "random", "tree"])
def test_grammars_with_every_drafter(drafter):
    asked = workload()
    check(run(make_engine(drafter), *asked), *asked)


def bits(words):
    return [i for i in range(32) if words[0] >> np.uint32(i) & 1]


def test_what_may_follow_each_node_of_a_tree():
    """Behind `a`: b alone; behind `ab` or `de`: a, d and f; behind what is forbidden: anything."""
    matcher = letter_grammars().matcher(REGEXES[0])
    a, b, d, e, f = encode_letters("abdef")
    allowed = np.full((7, 1), 0xFFFFFFFF, np.uint32)
    matcher.fill(allowed, [9, a, d, b, f, e, f], [-1, 0, 0, 1, 3, 2, 0])
    anything = list(range(32))
    assert [bits(row) for row in allowed] == [
        [a, d],
        [b],
        [e],
        [a, d, f],
        [EOS],
        [a, d, f],
        anything,
    ]
    again = np.zeros((1, 1), np.uint32)
    matcher.fill(again, [9])
    assert bits(again[0]) == [a, d], "the text so far is as it was"


def test_rows_without_a_grammar_may_say_anything():
    allowed = allowed_tokens([], np.zeros((2, 3), np.int32), None, 33)
    assert allowed.shape == (2, 3, 2)
    assert (allowed == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (dict(regex="(ab"), "structured_outputs.regex cannot be used: at 1(8): invalid regex"),
        (dict(json='{"type": "foo"}'), "structured_outputs.json cannot be used: Invalid type: foo"),
        (dict(json="{nonsense"), "structured_outputs.json cannot be used: "),
        (dict(grammar="start: nothing_such"), "structured_outputs.grammar cannot be used: "),
        (dict(json={"enum": [{1, 2}]}), "structured_outputs.json cannot be used: Object of type"),
        (
            dict(grammar="start: x\nx: x"),
            "structured_outputs.grammar cannot be used: no text of th",
        ),
        (
            dict(json_object=True),
            "structured_outputs.json_object cannot be used: no text of this v",
        ),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_used_is_refused(asked, reason):
    with pytest.raises(RequestError, match="^" + re.escape(reason)) as caught:
        make_engine().add_request(
            request("a", [1], structured_outputs=StructuredOutputsParams(**asked))
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (dict(choice=["bad", "dab"]), "bad"),
        (dict(grammar='start: ("ab" | "d")+'), "abd"),
        (dict(json=json.dumps({"enum": [12, 34]})), "34"),
        (dict(json={"type": "integer"}), "12"),
    ],
    ids=str,
)
def test_each_kind_of_structure_makes_a_matcher(asked, text):
    matcher = letter_grammars().matcher(StructuredOutputsParams(**asked))
    matcher.consume(encode_letters(text))
    assert matcher.error is None


MANY_TEXTS = ["".join(text) for text in itertools.product("abde", repeat=6)]
# More alternatives of a rule than llguidance follows; it finds out at the second letter.
GIVES_UP = StructuredOutputsParams(grammar="start: " + " | ".join(map(json.dumps, MANY_TEXTS)))


def test_a_choice_may_be_among_thousands_of_texts():
    asked = request("a", [4, 5], structured_outputs=StructuredOutputsParams(choice=MANY_TEXTS))
    output = run(make_engine(), asked)["a"]
    assert output.outputs[0].finish_reason is FinishReason.STOP
    tokens = tokens_of(output)
    assert tokens[-1] == EOS and tokens[:-1] in map(encode_letters, MANY_TEXTS)


def test_a_grammar_that_gives_up_amid_a_text_ends_its_request_alone():
    for overlap in (True, False):
        engine = make_engine(overlap=overlap, accepts=3)
        plain = [
            request("runs", [1, 2, 3], max_tokens=20, ignore_eos=True),
            request("later", [9] * 5, max_tokens=12, ignore_eos=True),
        ]
        asked = request("gives up", [4, 5], max_tokens=12, structured_outputs=GIVES_UP)
        outputs = run(engine, plain[0], asked, plain[1])
        check(outputs, *plain)
        completion = outputs["gives up"].outputs[0]
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.stop_reason is None
        assert outputs["gives up"].error.startswith("structured_outputs.grammar cannot go on: ")
        assert "\n" not in outputs["gives up"].error
        engine.check_idle()
        check(run(engine, *plain), *plain)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "structured_outputs has nothing; give one of json, regex, choice, grammar, json_obj"),
        (dict(regex="a", json_object=True), "structured_outputs has regex and json_object; give"),
        (dict(choice=[]), "structured_outputs.choice is empty; give at least one text"),
        (dict(regex=3), "regex is 3; it must be text, or None"),
    ],
    ids=str,
)
def test_a_structure_is_one_thing(asked, message):
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        StructuredOutputsParams(**asked)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(ignore_eos=True), "ignore_eos is True, but structured_outputs say where the answer"),
        (dict(min_tokens=3), "min_tokens is 3, but structured_outputs say where the answer ends"),
    ],
    ids=str,
)
def test_what_contradicts_a_structure_is_refused(params, message):
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        SamplingParams(structured_outputs=REGEXES[0], **params)
    with pytest.raises(RequestError, match=r"^structured_outputs is 'x'; give StructuredOutputs"):
        SamplingParams(structured_outputs="x")


def test_what_a_structure_needs_is_named():
    engine = make_engine()
    engine._grammars = None
    message = "structured_outputs asks for regex, which needs a tokenizer"
    with pytest.raises(RequestError, match="^" + message):
        engine.add_request(request("a", [1], structured_outputs=REGEXES[0]))
    engine = make_engine()
    engine._eos_token_ids = ()
    message = "structured_outputs asks for regex, which needs a model that can end its answer"
    with pytest.raises(RequestError, match="^" + message):
        engine.add_request(request("a", [1], structured_outputs=REGEXES[0]))


def test_without_llguidance_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    message = r"^structured_outputs asks for regex, which needs llguidance; pip install -e '\.\[g"
    with pytest.raises(RequestError, match=message):
        letter_grammars().matcher(REGEXES[0])
