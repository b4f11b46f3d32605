"""What a request leaves in the prefix cache, however it ends, is the KV of its own text alone."""

import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.request import FinishReason
from tests.engine.test_errors import engine_with_bad_states, state_after
from tests.fakes import PieceDetokenizer, letters
from tests.harness import (
    BLOCK,
    PAGE,
    check,
    drain,
    expected,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)

PROMPT = [(7 * i) % 32 for i in range(6)]
WHOLE = request("whole", PROMPT, max_tokens=20, ignore_eos=True)
PLAIN = list(expected(WHOLE))
LONG = [(5 * i + 3) % 32 for i in range(24)]


def text_engine(*states, **options):
    """An engine that spells its tokens, and whose logits are NaN at some checksum states."""
    options.setdefault("accepts", BLOCK - 1)
    return engine_with_bad_states(
        *states, make_detokenizer=lambda _: PieceDetokenizer(letters()), **options
    )


def follow(engine, prompt, accepts):
    """Serves a text that begins as what was left, and tells how much of it was of use.

    The drafter is right wherever its KV is, so its rows show in the accept lengths.
    """
    asked = request("next", prompt, max_tokens=30 - len(prompt), ignore_eos=True)
    outputs = run(engine, asked)
    check(outputs, asked)
    assert outputs["next"].metrics.accept_lengths == scripted_accept_lengths(asked, accepts)
    engine.check_idle()
    return outputs["next"].num_cached_tokens


ENDS = {
    "a stop string": (dict(stop=letters()[PLAIN[4]].decode()), 5, "stop"),
    "a stop string before bad logits": (dict(stop=letters()[PLAIN[6]].decode()), 7, "stop"),
    "a stop id": (dict(stop_token_ids=[PLAIN[5]]), 6, "stop"),
    "its limit": (dict(max_tokens=7), 7, "length"),
    "bad logits": (dict(), 7, "error"),
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("accepts", [BLOCK - 1, 2], ids=["one block", "short blocks"])
@pytest.mark.parametrize("end", ENDS)
def test_what_is_left_of_a_request_that_ends_inside_a_block(end, accepts, overlap):
    """Behind the end stand drafts that were right: plain decoding would not have written them.

    The texts that follow go on as the first would have, as it ended, and with another token there.
    """
    params, count, reason = ENDS[end]
    assert len(set(PLAIN[:count])) == count, "the end must not come earlier"
    for going_on in (PLAIN[:12], PLAIN[:count], [*PLAIN[:count], (PLAIN[count] + 1) % 32]):
        bad = [state_after(WHOLE, 7)] if "bad" in end else []
        engine = text_engine(*bad, accepts=accepts, overlap=overlap)
        asked = request("first", PROMPT, **{"max_tokens": 20, "ignore_eos": True, **params})
        first = run(engine, asked)["first"]
        assert tokens_of(first) == PLAIN[:count]
        assert first.outputs[0].finish_reason == reason
        engine._programs.params = text_engine(accepts=accepts)._programs.params
        num_cached = follow(engine, PROMPT + going_on, accepts)
        # Of the last token there is no KV; a failed request's is not kept.
        assert num_cached == (0 if reason == "error" else (len(PROMPT) + count - 1) // PAGE * PAGE)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("steps", range(1, 5))
def test_what_is_left_of_a_request_that_is_aborted_with_steps_in_flight(steps, overlap):
    """At its first chunk, its last, and between blocks."""
    for prompt in (PROMPT, LONG[:21]):
        engine = text_engine(accepts=2, overlap=overlap)
        first = request("first", prompt, max_tokens=None, ignore_eos=True)
        text = [*prompt, *expected(first)]
        engine.add_request(first)
        for _ in range(steps):
            engine.step()
        assert engine.abort("first") is not None
        drain(engine)
        assert follow(engine, text[:28], accepts=2) >= (4 if steps > 1 else 0)


@pytest.mark.parametrize("caught", ["prefill", "decode"])
def test_what_is_left_of_a_request_that_gives_way_serves_others(caught):
    """Preempted between its chunks, or with a block in flight; then another text takes its pages.

    The one that gave way is aborted while it waits, so that nobody but its pages is left.
    """
    accepts = 7 if caught == "prefill" else 2
    engine = text_engine(accepts=accepts, prefill_buckets=(1,))
    engine._use_pool(PagePool(1 + 15))
    first = request("first", [1], max_tokens=None, ignore_eos=True)
    prompt = LONG[:20] if caught == "prefill" else PROMPT
    second = request("second", prompt, max_tokens=None, ignore_eos=True)
    engine.add_request(first)
    engine.step()
    engine.add_request(second)
    outputs = {}
    while not engine.stats.num_preemptions:
        outputs |= {output.request_id: output for output in engine.step()}
    (waits,) = engine._waiting
    assert waits.request is second
    assert bool(waits.output_ids) == (caught == "decode")
    aborted = engine.abort("second")
    assert aborted.outputs[0].finish_reason is FinishReason.ABORT
    outputs |= drain(engine)
    check(outputs, first)
    text = [*prompt, *expected(second)]
    assert follow(engine, text[:25], accepts) > 0
