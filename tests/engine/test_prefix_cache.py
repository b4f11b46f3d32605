"""A prompt takes the pages of an earlier text that begins alike; text and accept lengths stay."""

import jax
import numpy as np
import pytest

from jaxspec.request import FinishReason
from tests.harness import (
    SCRIPT,
    check,
    drain,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)

PROMPT = [(7 * i) % 32 for i in range(12)]


def prefilled(calls):
    """Prompt tokens that the prefill dispatches computed."""
    return sum(int(c.packed[c.packed[:, 0] > 0, 2].sum()) for c in calls if c.kind == "prefill")


def test_a_hit_stops_where_the_drafters_rows_would_differ():
    """Row 7 of an EAGLE-like drafter holds token 8, which the second prompt has otherwise."""
    asked = [
        request("first", [*PROMPT[:8], 1, 1], ignore_eos=True),
        request("second", [*PROMPT[:8], 3, 1], ignore_eos=True),
    ]
    for drafter, hit in (("scripted", 4), ("ngram", 8)):
        engine = make_engine(drafter)
        outputs = run(engine, asked[0]) | run(engine, asked[1])
        check(outputs, *asked)
        assert outputs["second"].num_cached_tokens == hit
        if drafter == "scripted":
            lengths = outputs["second"].metrics.accept_lengths
            assert lengths == scripted_accept_lengths(asked[1], SCRIPT)


def test_a_chat_turn_finds_the_answer_before_it():
    """The KV that decoding wrote, accepted drafts and all, serves the next turn's prompt."""
    engine = make_engine()
    first = request("first", PROMPT, max_tokens=9, ignore_eos=True)
    answer = tokens_of(run(engine, first)["first"])
    turn = [*PROMPT, *answer, 5, 6, 7]
    second = request("second", turn, ignore_eos=True, max_tokens=8)
    outputs = run(engine, second)
    check(outputs, second)
    assert outputs["second"].num_cached_tokens == 20  # of 12 + 9 tokens, 20 rows were final
    assert outputs["second"].metrics.accept_lengths == scripted_accept_lengths(second, SCRIPT)


def test_prompts_of_one_dispatch_share_what_it_writes():
    engine = make_engine()
    calls = record(engine)
    asked = [request(f"r{i}", [*PROMPT[:9], i], ignore_eos=True) for i in range(2)]
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert [outputs[f"r{i}"].num_cached_tokens for i in range(2)] == [0, 8]
    assert [call.kind for call in calls].count("prefill") == 1
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(each, SCRIPT)


def test_a_prompt_begins_with_what_the_dispatches_before_have_written_of_anothers():
    """The first is long and in the middle of its chunks: the second takes the first chunk."""
    long = [(5 * i + 3) % 32 for i in range(28)]
    engine = make_engine()
    first, second = request("first", long), request("second", [*long[:27], 1])
    engine.add_request(first)
    engine.step()
    outputs = run(engine, second)
    check(outputs, first, second)
    assert outputs["second"].num_cached_tokens >= 16


@pytest.mark.parametrize("drafter", ["scripted", "ngram"])
def test_hits_in_any_order_change_no_text(drafter):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 32, 24).tolist() for _ in range(3)]
    asked = []
    for i in range(30):
        text = list(texts[rng.integers(3)][: rng.integers(1, 24)])
        text[-1] = int(rng.integers(32))
        params = {"temperature": 0.8, "seed": i} if i % 3 == 0 else {}
        asked.append(request(f"r{i}", text, max_tokens=int(rng.integers(1, 10)), **params))
    engine = make_engine(drafter)
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert sum(output.num_cached_tokens for output in outputs.values()) > 40
    if drafter == "scripted":
        for each in asked:
            lengths = outputs[each.request_id].metrics.accept_lengths
            assert lengths == scripted_accept_lengths(each, SCRIPT)


def test_an_aborted_requests_pages_are_of_use():
    engine = make_engine()
    engine.add_request(request("first", PROMPT, ignore_eos=True))
    engine.step()
    engine.abort("first")
    second = request("second", PROMPT)
    outputs = drain(engine) | run(engine, second)
    check(outputs, second)
    assert outputs["second"].num_cached_tokens == 8


def test_of_a_prompt_that_is_aborted_between_its_chunks_only_what_was_written_is_taken():
    """16 of 28 tokens were dispatched; the pages behind them belong to the text, but are empty."""
    engine, long = make_engine(), [(5 * i + 3) % 32 for i in range(28)]
    engine.add_request(request("first", long))
    engine.step()
    engine.abort("first")
    drain(engine)
    second = request("second", long)
    outputs = run(engine, second)
    check(outputs, second)
    assert outputs["second"].num_cached_tokens == 16
    assert outputs["second"].metrics.accept_lengths == scripted_accept_lengths(second, SCRIPT)


def test_a_failed_requests_pages_are_not_taken():
    """What made its logits infinite may lie in them."""
    engine = make_engine()
    first = request("first", PROMPT, ignore_eos=True, max_tokens=16)
    params = engine._programs.params
    run(engine, request("before", PROMPT[:5]))
    engine.add_request(first)
    engine.step()
    engine._programs.params = params.replace(target=params.target * jax.numpy.nan)
    assert drain(engine)["first"].outputs[0].finish_reason is FinishReason.ERROR
    engine._programs.params = params
    second = request("second", PROMPT)
    outputs = run(engine, second)
    check(outputs, second)
    assert outputs["second"].num_cached_tokens == 4, "the page of the request before"


def test_without_the_cache_nothing_is_taken():
    engine = make_engine(prefix_caching=False)
    for name in "ab":
        asked = request(name, PROMPT)
        outputs = run(engine, asked)
        check(outputs, asked)
        assert outputs[name].num_cached_tokens == 0
    assert engine._pages.pool.num_idle == 0
