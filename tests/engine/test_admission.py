"""Requests that can never run are refused with the numbers; the rest wait for slots and pages."""

import re

import numpy as np
import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.engine.admission import request_key
from jaxspec.mode import Mode
from jaxspec.request import MAX_SEED, Request, RequestError, SamplingParams
from tests.harness import (
    CONTEXT,
    check,
    drain,
    expected,
    make_engine,
    record,
    request,
    run,
    tokens_of,
)


def refused(engine, asked, message):
    with pytest.raises(RequestError, match="^" + re.escape(message) + "$"):
        engine.add_request(asked)
    assert not engine.has_unfinished
    engine.check_idle()


def test_an_empty_prompt_is_refused():
    refused(make_engine(), request("a", []), "the prompt is empty; it needs at least one token")


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_without_room_for_a_token_is_refused(length):
    refused(
        make_engine(),
        request("a", [1] * length),
        f"the prompt has {length} tokens, but max_model_len is 32 and one token must fit after "
        "it; shorten the prompt or raise max_model_len",
    )


@pytest.mark.parametrize("token", [-1, 32, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token):
    """F6: an id that no embedding has must not come in."""
    refused(
        make_engine(),
        request("a", [3, token, 4]),
        f"token id {token!r} is outside the vocabulary; ids are 0 to 31",
    )


@pytest.mark.parametrize("token", [1.5, "1", True], ids=str)
def test_a_token_that_is_no_whole_number_is_refused(token):
    refused(
        make_engine(),
        request("a", [3, token, 4]),
        f"token id {token!r} is not a whole number; give integer ids",
    )


def test_a_stop_id_outside_the_vocabulary_is_refused():
    refused(
        make_engine(),
        request("a", [3], stop_token_ids=[32]),
        "token id 32 is outside the vocabulary; ids are 0 to 31",
    )


def test_more_stop_ids_than_the_step_holds_are_refused():
    refused(
        make_engine(),
        request("a", [3], stop_token_ids=[5, 6, 7, 8]),
        "stop_token_ids and EOS ids are 5; at most 4 are possible",
    )


def test_a_stop_id_that_is_eos_counts_once():
    asked = request("a", [3], stop_token_ids=[2, 6, 7, 8])
    check(run(make_engine(), asked), asked)


def test_stop_strings_without_a_tokenizer_are_refused():
    refused(
        make_engine(),
        request("a", [3], stop="x"),
        "stop is ('x',), which needs a tokenizer; give the engine one",
    )


def test_an_id_in_use_is_refused_and_free_again_at_the_end():
    engine, asked = make_engine(), request("a", [3])
    engine.add_request(asked)
    with pytest.raises(
        RequestError, match=r"^request_id 'a' is in use; wait for its end or take another$"
    ):
        engine.add_request(asked)
    check(drain(engine), asked)
    check(run(engine, asked), asked)


def engine_of_pages(num_pages, **options):
    """An engine whose host gives out fewer pages than the device has; nothing recompiles."""
    engine = make_engine(**options)
    engine._use_pool(PagePool(1 + num_pages))
    return engine


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    # 15 tokens and two blocks of 8 are 31 rows: 8 pages of 4.
    asked = request("a", [1, 2, 3], max_tokens=12)
    refused(
        engine_of_pages(7),
        asked,
        "the request may need 8 KV pages (3 prompt tokens, up to 15 in all), but the pool has 7; "
        "lower max_tokens or enlarge kv_cache_tokens",
    )
    check(run(engine_of_pages(8), asked), asked)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(("num_pages", "most"), [(12, 2), (18, 3), (36, 3)])
def test_requests_wait_for_pages_in_their_order(num_pages, most, overlap):
    """Each may come to need 12 pages; they enter by the 5 that they need at first."""
    engine = engine_of_pages(num_pages, overlap=overlap)
    asked = [request(f"r{i}", [i + 1] * 3, max_tokens=None, ignore_eos=True) for i in range(6)]
    for each in asked:
        engine.add_request(each)
    order, outputs, at_once = [], {}, 0
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id] = output
            order += [output.request_id] if output.finished else []
        at_once = max(at_once, len(engine._running) + len(engine._prefilling))
        assert engine.num_free_pages >= 0
    check(outputs, *asked)
    assert at_once == most
    assert order == sorted(order), "equal lengths end in the order of arrival"
    assert engine.num_free_pages == num_pages


def test_a_short_request_does_not_overtake_the_first_that_waits():
    engine = engine_of_pages(13)
    long = [request(f"long{i}", [i + 1] * 9, max_tokens=None, ignore_eos=True) for i in range(2)]
    short = request("short", [5], max_tokens=1)
    for each in (*long, short):
        engine.add_request(each)
    finished = []
    while engine.has_unfinished:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["long0", "short", "long1"]


def test_many_requests_through_few_pages_all_end():
    rng = np.random.default_rng(5)
    asked = [
        request(f"r{i}", rng.integers(0, 32, rng.integers(1, 31)).tolist(), max_tokens=int(limit))
        for i, limit in enumerate(rng.integers(1, 32, 60))
    ]
    engine = engine_of_pages(14)
    check(run(engine, *asked), *asked)
    assert engine.num_free_pages == 14


def test_a_long_prompt_goes_in_pieces_while_others_decode():
    engine = make_engine()
    calls = record(engine)
    first = request("first", [4, 5], ignore_eos=True, max_tokens=20)
    engine.add_request(first)
    engine.step()
    long = request("long", [(i * 7) % 32 for i in range(25)])
    outputs = run(engine, long)
    check(outputs, first, long)
    kinds = [call.kind for call in calls]
    assert kinds[:6] == ["prefill", "decode", "prefill", "decode", "prefill", "decode"]


def test_a_sampled_request_beside_greedy_ones_uses_the_other_programs():
    engine = make_engine()
    calls = record(engine)
    greedy = request("g", [1, 2], max_tokens=2)
    run(engine, greedy)
    assert {call.mode for call in calls} == {Mode.GREEDY}
    calls.clear()
    run(engine, greedy, request("s", [1], temperature=0.5, seed=1, max_tokens=2))
    assert {call.mode for call in calls} == {Mode.SAMPLED}


def test_a_top_k_above_any_vocabulary_filters_nothing():
    asked = [
        request(f"k{top_k}", [3, 4], temperature=1.0, seed=5, top_k=top_k)
        for top_k in (0, -1, 32, 2**31, 2**40)
    ]
    outputs = run(make_engine(), *asked)
    assert len({tuple(tokens_of(output)) for output in outputs.values()}) == 1


def test_temperatures_as_high_as_they_may_be_are_as_flat_as_it_gets():
    asked = [
        request(f"t{temperature}", [3, 4], temperature=temperature, seed=5)
        for temperature in (1e20, 1e30)
    ]
    outputs = run(make_engine(), *asked)
    assert len({tuple(tokens_of(output)) for output in outputs.values()}) == 1


def test_seeds_of_64_bits_make_keys_of_two_words():
    keys = [request_key(seed, 0, 0).tolist() for seed in (0, 5, 2**32, 2**32 + 5, MAX_SEED)]
    assert len({tuple(key) for key in keys}) == 5, "both halves of the seed count"
    assert request_key(7, 1, 1).tolist() == request_key(7, 2, 2).tolist()
    assert request_key(7, 0, 0).dtype == np.uint32


def test_requests_without_a_seed_differ_and_repeat_with_the_engines():
    keys = [request_key(None, seed, index).tolist() for seed in (0, 1) for index in (0, 1)]
    assert len({tuple(key) for key in keys}) == 4
    assert keys[0] == request_key(None, 0, 0).tolist()


def test_the_largest_seed_runs():
    asked = request("a", [3], temperature=1.0, seed=MAX_SEED)
    assert tokens_of(run(make_engine(), asked)["a"]) == list(expected(asked))


def test_ids_may_be_numpy_integers():
    prompt = tuple(np.array([3, 4], np.int64))
    asked = Request("a", prompt, SamplingParams(temperature=0.0))
    assert tokens_of(run(make_engine(), asked)["a"]) == list(
        expected(request("b", [3, 4], max_tokens=16))
    )
