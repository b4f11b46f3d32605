"""When pages run out, the last that came gives up its own and resumes with the same text."""

import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.request import FinishReason
from tests.harness import check, drain, expected, make_engine, record, request, run, tokens_of


def engine_of_pages(num_pages, **options):
    """An engine whose host gives out fewer pages than the device has; nothing recompiles."""
    engine = make_engine(**options)
    engine._use_pool(PagePool(1 + num_pages))
    return engine


def long_requests(count, **params):
    """Requests of up to 32 tokens: 12 pages each in the end, 5 at first."""
    params = {"max_tokens": None, "ignore_eos": True, **params}
    return [request(f"r{i}", [i + 1, 5, 9], **params) for i in range(count)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.8}], ids=str)
def test_preempted_requests_end_with_the_text_of_a_run_alone(sampling, caching, overlap):
    """F18: two of three are retracted while a step of theirs is in flight; its result is lost."""
    engine = engine_of_pages(15, overlap=overlap, prefix_caching=caching)
    asked = long_requests(3, **sampling)
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert engine.stats.num_preemptions >= 1
    assert outputs["r0"].metrics.num_preemptions == 0, "the first that came is never preempted"


def test_a_request_may_be_preempted_twice():
    """F18: accept lengths are 1, so all grow slowly and run into one another again and again."""
    engine = engine_of_pages(16, accepts=0)
    asked = long_requests(4)
    outputs = run(engine, *asked)
    check(outputs, *asked)
    assert max(output.metrics.num_preemptions for output in outputs.values()) >= 2


def test_what_was_in_flight_of_a_preempted_request_is_dropped_whole():
    """F18: what has been streamed is never taken back, and nothing of the late result is added."""
    engine = engine_of_pages(14)
    asked = long_requests(2)
    for each in asked:
        engine.add_request(each)
    seen, preempted_with = {"r0": 0, "r1": 0}, None
    while engine.has_unfinished:
        in_flight = [e.seq for d in engine._in_flight for e in d.entries]
        outputs = {output.request_id: output for output in engine.step()}
        if engine.stats.num_preemptions and preempted_with is None:
            (victim,) = [seq for seq in in_flight if seq.is_preempted]
            preempted_with = len(victim.output_ids)
            assert "r1" not in outputs
        for name, output in outputs.items():
            tokens = tokens_of(output)
            assert len(tokens) > seen[name]
            want = list(expected(next(a for a in asked if a.request_id == name)))
            assert tokens == want[: len(tokens)]
            seen[name] = len(tokens)
    assert preempted_with is not None


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
        while slot not in engine._free_slots:
            engine.step()
        assert len(calls) <= 2
        assert not engine._pages.pool._owners[pages].any()
        drain(engine)


def test_a_pool_for_one_request_serves_many():
    """F21: each may need the whole pool; none is refused, none fails, all end right."""
    engine = engine_of_pages(12)
    asked = long_requests(5)
    check(run(engine, *asked), *asked)
    assert engine.num_free_pages == 12


def test_two_requests_of_which_both_do_not_fit():
    """F21: admission counts the blocks in flight, and one gives way when the other grows."""
    engine = engine_of_pages(13)
    asked = long_requests(2)
    check(run(engine, *asked), *asked)
    assert engine.stats.num_preemptions >= 1


def test_a_long_prompt_gives_way_in_the_middle_of_its_chunks():
    """Three dispatches of prompt; what runs grows meanwhile and takes its pages."""
    engine = engine_of_pages(15, accepts=7, prefill_buckets=(1,))
    first = request("first", [1], max_tokens=None, ignore_eos=True)
    long = request("long", [(i * 7) % 32 for i in range(20)])
    engine.add_request(first)
    engine.step()
    outputs = run(engine, long)
    check(outputs, first, long)


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
