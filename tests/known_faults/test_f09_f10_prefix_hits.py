"""F9, F10: pages that requests share are never written, and hold the drafter's KV as well."""

import numpy as np
import pytest

from jaxspec.cache.page_pool import PagePool
from tests.harness import (
    PAGE,
    SCRIPT,
    check,
    drain,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
)

PROMPT = [(7 * i) % 32 for i in range(12)]


def prefilled(calls):
    """Prompt tokens that the prefill dispatches computed."""
    return sum(int(c.packed[c.packed[:, 0] > 0, 2].sum()) for c in calls if c.kind == "prefill")


def kv_of(engine, pages):
    """Target's and drafter's KV of pages."""
    pools = [*engine._programs.state.kv, *engine._programs.state.drafter_state]
    return np.concatenate([np.asarray(pool[np.array(pages)]).ravel() for pool in pools])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(("drafter", "hit"), [("scripted", 8), ("ngram", 8), ("none", 8)])
def test_the_second_of_two_equal_prompts_computes_its_end_alone(drafter, hit, overlap):
    """F10: the same accept lengths as cold, so the drafter's KV of the hit is whole."""
    engine = make_engine(drafter, overlap=overlap)
    first = request("first", PROMPT, ignore_eos=True)
    cold = run(engine, first)["first"]
    calls = record(engine)
    second = request("second", PROMPT, ignore_eos=True)
    warm = run(engine, second)["second"]
    check({"first": cold, "second": warm}, first, second)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, hit)
    assert prefilled(calls) == len(PROMPT) - hit
    assert warm.metrics.accept_lengths == cold.metrics.accept_lengths


@pytest.mark.parametrize("length", [8, 9, 12])
def test_shared_pages_are_never_written(length):
    """F9: R1 decodes on the prefix that R2 arrives with; R2's first drafts go to its own pages."""
    engine = make_engine()
    first = request("first", PROMPT[:length], max_tokens=20, ignore_eos=True)
    engine.add_request(first)
    engine.step()
    shared = engine._running[1].pages[: (length - 1) // PAGE]
    before = kv_of(engine, shared)
    second = request("second", PROMPT[:length], max_tokens=18, ignore_eos=True)
    outputs = run(engine, second)
    assert outputs["second"].num_cached_tokens == len(shared) * PAGE > 0
    assert kv_of(engine, shared).tolist() == before.tolist()
    check(outputs, first, second)
    for asked in (first, second):
        lengths = outputs[asked.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(asked, SCRIPT)


def test_kv_of_a_hit_equals_kv_of_a_cold_run():
    """F10: all rows of the prompt, the drafter's too, whatever was taken."""
    asked = request("cold", PROMPT, max_tokens=1)
    engines = [make_engine(), make_engine()]
    run(engines[1], request("before", PROMPT[:10], max_tokens=1))
    rows = []
    for engine in engines:
        engine.add_request(asked)
        engine._admit()
        engine._dispatch_prefill()
        (seq,) = engine._running.values()
        rows.append(kv_of(engine, seq.pages))
        drain(engine)
    assert rows[0].tolist() == rows[1].tolist()


def test_drafts_are_right_after_a_retraction_and_a_hit_on_what_was_written_before():
    """F10: the drafter is always right where its KV is whole, so each block is accepted in full."""
    engine = make_engine(accepts=7)
    engine._use_pool(PagePool(1 + 15))
    asked = [request(f"r{i}", [i + 1, 5, 9], max_tokens=None, ignore_eos=True) for i in range(3)]
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert engine.stats.num_preemptions >= 1
    for output in outputs.values():
        lengths = output.metrics.accept_lengths
        assert lengths[:-1] == [8] * (len(lengths) - 1)
