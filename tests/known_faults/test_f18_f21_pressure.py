"""F18, F21: when pages run out, requests give way and resume; late results are dropped whole."""

import pytest

from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from jaxspec.request import RequestError
from tests.engine.test_preemption import engine_of_pages, long_requests
from tests.engine.test_programs import compilations
from tests.harness import check, expected, request, run, tokens_of


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


def test_a_request_that_no_pool_could_hold_is_refused_and_the_next_one_served():
    """F21: 6 pages, of which one request may need 7 and the other 6."""
    engine = engine_of_pages(6)
    with pytest.raises(RequestError, match=r"may need 7 KV pages .*, but the pool has 6"):
        engine.add_request(request("large", [1, 2, 3], max_tokens=7))
    small = request("small", [1, 2, 3], max_tokens=4, ignore_eos=True)
    check(run(engine, small), small)
    assert engine.num_free_pages == 6


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


def test_nothing_compiles_at_the_first_retraction():
    """F27: what a resumed request runs was compiled for prompts."""
    engine = engine_of_pages(14)
    warmup(engine, modes=(Mode.GREEDY,))
    asked = long_requests(3)
    for each in asked:
        expected(each)
    compilations.clear()
    check(run(engine, *asked), *asked)
    assert engine.stats.num_preemptions >= 1
    assert compilations == []
