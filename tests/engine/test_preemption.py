"""When pages run out, the last that came gives up its own and resumes with the same text."""

import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.request import FinishReason
from tests.harness import (
    check,
    drain,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
)


def engine_of_pages(num_pages, **options):
    """An engine whose host gives out fewer pages than the device has; nothing recompiles."""
    engine = make_engine(**options)
    engine._use_pool(PagePool(1 + num_pages))
    return engine


def long_requests(count, **params):
    """Requests of up to 32 tokens: 12 pages each in the end, 5 at first."""
    params = {"max_tokens": None, "ignore_eos": True, **params}
    return [request(f"r{i}", [i + 1, 5, 9], **params) for i in range(count)]


def test_waiting_requests_keep_their_order():
    engine = engine_of_pages(14)
    asked = long_requests(6)
    for each in asked:
        engine.add_request(each)
    first_seen = []
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id not in first_seen:
                first_seen.append(output.request_id)
        waiting = [int(seq.request.request_id[1:]) for seq in engine._waiting]
        assert waiting == sorted(waiting)
    assert first_seen == [f"r{i}" for i in range(6)]
    assert engine.stats.num_preemptions


def test_a_request_without_pages_does_not_overtake_the_prompt_that_gives_way():
    """All three are admitted; the first takes the pages of the second before the third has any."""
    engine = engine_of_pages(9, drafter="none", max_num_batched_tokens=1)
    asked = [
        request("r0", [1], max_tokens=None, ignore_eos=True),
        request("r1", [2] + [3] * 19),
        request("r2", [5, 6]),
    ]
    for each in asked:
        engine.add_request(each)
    outputs, orders = {}, set()
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        known = [*engine._running.values(), *engine._prefilling, *engine._waiting]
        orders.add("".join(seq.request.request_id for seq in known))
    check(outputs, *asked)
    assert orders == {"r0r1r2", "r1r2", "r2", ""}
    assert [outputs[f"r{i}"].metrics.num_preemptions for i in range(3)] == [0, 1, 1]


@pytest.mark.parametrize(("accepts", "length", "limit"), [(7, 13, 2), (1, 9, 4), (1, 3, 4)])
def test_nobody_gives_way_where_another_ends_with_what_is_in_flight(accepts, length, limit):
    """The first needs pages while the second is full, but for the result on its way: it waits."""
    engine = engine_of_pages(12, accepts=accepts)
    first = request("first", [1], max_tokens=None, ignore_eos=True)
    second = request("second", [2] * length, max_tokens=limit, ignore_eos=True)
    engine.add_request(first)
    for _ in range(5 if length == 3 else 1):
        engine.step()
    outputs = run(engine, second)
    check(outputs, first, second)
    assert engine.stats.num_preemptions == 0
    assert outputs["first"].metrics.accept_lengths == scripted_accept_lengths(first, accepts)


def test_a_resumed_request_computes_only_what_the_cache_has_lost():
    engine = engine_of_pages(15)
    calls = record(engine)
    outputs = run(engine, *long_requests(2))
    assert engine.stats.num_preemptions == 1
    resumed = [c.packed for c in calls if c.kind == "prefill"][-1]
    again = resumed[resumed[:, 0] > 0]
    assert again[0, 1] > 0, "it starts behind pages that were its own"
    assert outputs["r1"].num_cached_tokens == 0, "which says nothing of its prompt"


@pytest.mark.parametrize("steps", range(3, 12))
def test_an_abort_amid_pressure_ends_that_request_alone(steps):
    engine = engine_of_pages(15)
    asked = long_requests(4)
    for each in asked:
        engine.add_request(each)
    outputs = {}
    for _ in range(steps):
        outputs |= {output.request_id: output for output in engine.step()}
    aborted = engine.abort("r1")
    outputs |= drain(engine)
    check(outputs, *[a for a in asked if a.request_id != "r1" or aborted is None])
    if aborted is not None:
        assert aborted.outputs[0].finish_reason is FinishReason.ABORT


def test_an_abort_frees_slot_and_pages_within_two_dispatches():
    for steps in range(1, 6):
        engine = make_engine()
        for each in long_requests(3):
            engine.add_request(each)
        for _ in range(steps):
            engine.step()
        if "r1" not in engine._by_id:
            break
        slot = engine._by_id["r1"].slot
        pages = list(engine._by_id["r1"].pages)
        calls = record(engine)
        engine.abort("r1")
        assert not engine._pages.pool._owners[pages].any()
        while slot not in engine._free_slots:
            engine.step()
        assert len(calls) <= 2
        drain(engine)


def test_a_long_prompt_gives_way_in_the_middle_of_its_chunks():
    """Three dispatches of prompt; what runs grows meanwhile and takes its pages."""
    engine = engine_of_pages(15, accepts=7, prefill_buckets=(1,))
    first = request("first", [1], max_tokens=None, ignore_eos=True)
    long = request("long", [(i * 7) % 32 for i in range(20)])
    engine.add_request(first)
    engine.step()
    outputs = run(engine, long)
    check(outputs, first, long)


def test_a_prompt_that_is_preempted_in_the_step_that_ends_it():
    """Its first token is on its way when what runs takes its pages; the token is made again."""
    engine = engine_of_pages(10, drafter="none", max_num_batched_tokens=3)
    first = request("first", [3], max_tokens=None, ignore_eos=True)
    long = request("long", [0] * 26, max_tokens=None, ignore_eos=True)
    engine.add_request(first)
    for _ in range(3):
        engine.step()
    engine.add_request(long)
    for _ in range(8):
        engine.step()
    seq = engine._by_id["long"]
    assert seq.num_prefilled < seq.prefill_len
    engine.step()
    assert seq.is_preempted and seq.num_prefilled == seq.prefill_len
    assert not seq.slot, "the result on its way has landed, and was dropped"
    check(drain(engine), first, long)


@pytest.mark.parametrize("drafter", ["none", "ngram", "random"])
def test_every_drafter_survives_pressure(drafter):
    engine = engine_of_pages(14 if drafter != "none" else 10, drafter=drafter)
    asked = long_requests(4)
    check(run(engine, *asked), *asked)
    assert engine.stats.num_preemptions >= 1


def test_loops_give_way_too():
    engine = engine_of_pages(21, decode_steps=3)
    asked = long_requests(3)
    check(run(engine, *asked), *asked)
