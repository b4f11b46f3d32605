"""Sampling parameters in vLLM's manner: what is taken, what is refused, and derived figures."""

import copy
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.mode import Mode
from jaxspec.request import (
    MAX_SEED,
    FinishReason,
    RequestError,
    RequestMetrics,
    SamplingParams,
    StructuredOutputsParams,
    sampling_params_fields,
)

RANGES = [
    ("temperature", -0.1, "it must be a finite number, at least 0 and at most 1e+30"),
    ("temperature", float("nan"), "it must be a finite number, at least 0 and at most 1e+30"),
    ("temperature", float("inf"), "it must be a finite number, at least 0 and at most 1e+30"),
    ("temperature", 1e39, "it must be a finite number, at least 0 and at most 1e+30"),
    ("top_p", 0.0, "it must be a finite number, above 0 and at most 1"),
    ("top_p", 1.01, "it must be a finite number, above 0 and at most 1"),
    ("top_p", float("nan"), "it must be a finite number, above 0 and at most 1"),
    ("min_p", -0.01, "it must be a finite number, at least 0 and at most 1"),
    ("min_p", 1.5, "it must be a finite number, at least 0 and at most 1"),
    ("top_k", -2, "it must be -1 or 0 (off) or at least 1"),
    ("seed", -1, f"it must be between 0 and {MAX_SEED}"),
    ("seed", 2**64, f"it must be between 0 and {MAX_SEED}"),
    ("max_tokens", 0, "it must be at least 1, or None for as many as the context holds"),
    ("presence_penalty", 2.5, "it must be a finite number, at least -2 and at most 2"),
    ("presence_penalty", float("nan"), "it must be a finite number, at least -2 and at most 2"),
    ("frequency_penalty", -2.5, "it must be a finite number, at least -2 and at most 2"),
    ("repetition_penalty", 0.0, "it must be a finite number, at least 0.01 and at most 10"),
    ("repetition_penalty", 11.0, "it must be a finite number, at least 0.01 and at most 10"),
    ("min_tokens", -1, "it must be at least 0"),
    ("logprobs", -1, "it must be between 0 and 20, or None for none"),
    ("logprobs", 21, "it must be between 0 and 20, or None for none"),
    ("prompt_logprobs", 21, "it must be between 0 and 20, or None for none"),
    ("n", 0, "it must be between 1 and 128"),
    ("n", 129, "it must be between 1 and 128"),
    ("max_tokens", -3, "it must be at least 1, or None for as many as the context holds"),
]


@pytest.mark.parametrize(("name", "value", "limit"), RANGES, ids=str)
def test_a_value_out_of_range_is_refused(name, value, limit):
    with pytest.raises(RequestError, match="^" + re.escape(f"{name} is {value!r}; {limit}") + "$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "0.5", "a number"),
        ("temperature", None, "a number"),
        ("top_p", "1", "a number"),
        ("min_p", True, "a number"),
        ("top_k", 2.5, "a whole number"),
        ("top_k", None, "a whole number"),
        ("seed", 1.0, "a whole number"),
        ("max_tokens", 2.5, "a whole number"),
        ("max_tokens", "16", "a whole number"),
        ("max_tokens", False, "a whole number"),
        ("presence_penalty", "1", "a number"),
        ("min_tokens", 1.5, "a whole number"),
        ("bad_words", (1,), "text or a list of texts"),
        ("logit_bias", {"5": 1.0}, "a number for each of some whole numbers, or None"),
        ("logit_bias", [5], "a number for each of some whole numbers, or None"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(name, value, words):
    with pytest.raises(
        RequestError, match="^" + re.escape(f"{name} is {value!r}; it must be {words}")
    ):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1),
        ("temperature", np.float32(0.5)),
        ("max_tokens", np.int64(5)),
        ("temperature", 1e9),
        ("top_p", 1e-9),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 2**40),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("max_tokens", 1),
        ("max_tokens", None),
    ],
    ids=str,
)
def test_a_value_at_the_edge_is_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    "nothing",
    [
        {"logit_bias": {}},
        {"bad_words": None},
        {"bad_words": []},
        {"repetition_penalty": 1},
        {"min_tokens": 0},
    ],
    ids=str,
)
def test_what_changes_nothing_costs_nothing(nothing):
    assert SamplingParams(**nothing).mode is Mode.SAMPLED
    assert SamplingParams(**nothing, temperature=0).mode is Mode.GREEDY


@pytest.mark.parametrize(
    "edit",
    [
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2},
        {"repetition_penalty": 0.5},
        {"logit_bias": {3: 100.0}},
        {"min_tokens": 16},
        {"bad_words": "x"},
    ],
    ids=str,
)
def test_what_changes_logits_asks_for_their_programs(edit):
    assert SamplingParams(**edit, temperature=0).mode is Mode.EDITED


def test_logprobs_ask_for_their_programs_where_they_are_needed():
    assert SamplingParams(logprobs=0, temperature=0).mode is Mode.LOGPROBS
    assert SamplingParams(logprobs=0, min_tokens=3).prefill_mode is Mode.LOGPROBS
    of_prompt = SamplingParams(prompt_logprobs=0, temperature=0)
    assert (of_prompt.mode, of_prompt.prefill_mode) == (Mode.GREEDY, Mode.PROMPT_LOGPROBS)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            dict(n=2, temperature=0),
            "n is 2, but temperature 0 makes all copies equal; raise temperature or leave n at 1",
        ),
        (
            dict(min_tokens=17),
            "min_tokens is 17, but max_tokens is 16; lower the one or raise the other",
        ),
        (dict(bad_words=["a", " "]), "bad_words holds a blank string; each needs a visible"),
        (
            dict(logit_bias={3: 101.0}),
            "logit_bias of token 3 is 101.0; it must be a finite number, at least -100 and at most",
        ),
        (
            dict(logit_bias=dict.fromkeys(range(301), 1.0)),
            "logit_bias has 301 entries; at most 300 are possible",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_edits_that_cannot_be_meant_are_refused(params, message):
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        SamplingParams(**params)


def test_stop_is_a_string_or_several():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_an_empty_stop_string_is_refused():
    with pytest.raises(
        RequestError, match=r"^stop holds an empty string; each stop string needs a character$"
    ):
        SamplingParams(stop=["a", ""])


def test_temperature_zero_is_greedy_whatever_the_filters_say():
    assert SamplingParams(temperature=0.0, top_k=5, top_p=0.3).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize(
    ("make", "name", "sentence"),
    [
        (
            SamplingParams,
            "temprature",
            "unknown field of SamplingParams 'temprature'; did you mean 'temperature'?",
        ),
        (
            SamplingParams,
            "max_new_tokens",
            "unknown field of SamplingParams 'max_new_tokens'; did you mean 'max_tokens'?",
        ),
        (StructuredOutputsParams, "regexp", "'regexp'; did you mean 'regex'?"),
        (SamplingParams, "zzz", "'zzz'; known: bad_words, "),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(make, name, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)):
        make(**{name: 3})


# Fields of vLLM's SamplingParams, September 2026, but for those of its own bookkeeping.
VLLM = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
trace_decode_token_ids
"""
OLDER_VLLM = "best_of use_beam_search logits_processors truncate_prompt_tokens guided_decoding"


def test_each_field_of_vllm_works_or_is_refused_by_name():
    known = sampling_params_fields()
    for name in f"{VLLM} {OLDER_VLLM}".split():
        if name in known:
            continue
        sentence = rf"^SamplingParams has no field '{name}': \w.*[^.]$"
        with pytest.raises(RequestError, match=sentence):
            SamplingParams(**{name: None})
    assert set(known) <= set(VLLM.split()), "under vLLM's names"


def test_fields_are_given_by_name():
    message = "SamplingParams is given 0.5 without a name; write SamplingParams(temperature=...)"
    with pytest.raises(RequestError, match="^" + re.escape(message) + "$"):
        SamplingParams(0.5)


def test_settings_can_be_copied_and_pickled():
    params = SamplingParams(seed=3, stop="x", structured_outputs=None)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert replace(params, seed=4).seed == 4


def test_stop_strings_need_text():
    message = "stop is ('x',), which is found in text, but detokenize is False; leave out the one"
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        SamplingParams(stop="x", detokenize=False)


def test_the_fields_are_listed_with_their_types():
    listed = sampling_params_fields()
    assert listed["temperature"] == "float"
    assert listed["seed"] == "int | None"
    assert "stop" in listed


def test_figures_of_a_request_without_a_verify_are_unknown():
    metrics = RequestMetrics(arrival_s=10.0)
    assert metrics.mean_accept_length is None
    assert metrics.time_to_first_token_s is None


def test_the_bonus_token_counts_in_the_mean_accept_length():
    metrics = RequestMetrics(
        arrival_s=10.0, first_token_s=12.5, num_verifies=4, num_draft_tokens=28, num_accepted=10
    )
    assert metrics.mean_accept_length == 3.5
    assert metrics.time_to_first_token_s == 2.5


def test_finish_reasons_are_the_words_of_the_api():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
