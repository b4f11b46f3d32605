"""Long prompts go in pieces: what runs beside them waits for one piece at most, nothing differs."""

import itertools

import jax
import numpy as np
import pytest

from tests.harness import (
    PAGE,
    SCRIPT,
    check,
    make_engine,
    record,
    request,
    run,
    scripted_accept_lengths,
)

LONG = [(i * 7 + i * i) % 32 for i in range(27)]


def valid_tokens(call):
    """Prompt tokens of a prefill dispatch."""
    return int(call.packed[call.packed[:, 0] > 0, 2].sum())


@pytest.mark.parametrize("budget", [1, 3, 4, 6, 16])
def test_running_requests_wait_for_one_piece_at_a_time(budget):
    engine = make_engine(max_num_batched_tokens=budget)
    calls = record(engine)
    first = request("first", [4], ignore_eos=True, max_tokens=30)
    engine.add_request(first)
    engine.step()
    long = request("long", LONG)
    outputs = run(engine, long)
    check(outputs, first, long)
    kinds = [call.kind for call in calls]
    decodes = [i for i, call in enumerate(calls) if call.kind == "decode"]
    last = max(i for i in decodes if 1 in calls[i].packed[:, 0])
    assert "prefill" in kinds[2:last]
    assert all({*pair} != {"prefill"} for pair in itertools.pairwise(kinds[:last]))
    sizes = [valid_tokens(call) for call in calls if call.kind == "prefill"]
    assert max(sizes) <= budget
    assert sum(sizes) == 1 + len(LONG)
    for asked in (first, long):
        lengths = outputs[asked.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(asked, SCRIPT)


def test_without_chunks_prompts_go_before_what_runs():
    engine = make_engine(chunked_prefill=False, max_num_batched_tokens=4)
    calls = record(engine)
    first = request("first", [4], ignore_eos=True, max_tokens=30)
    engine.add_request(first)
    engine.step()
    long = request("long", LONG)
    outputs = run(engine, long)
    check(outputs, first, long)
    kinds = [call.kind for call in calls]
    assert kinds[:2] == ["prefill", "decode"]
    assert kinds[2:9] == ["prefill"] * 7
    assert "prefill" not in kinds[9:]


def states_at_edges(engine, asked):
    """Rows of target's and drafter's KV, and the carry, after each piece of a prompt."""
    engine.add_request(asked)
    engine._admit()
    edges = []
    while engine._prefilling:
        engine._dispatch_prefill()
        (seq,) = [*engine._prefilling, *engine._running.values()]
        pools = [*engine._programs.state.kv, *engine._programs.state.drafter_state]
        locs = [seq.pages[p // PAGE] * PAGE + p % PAGE for p in range(seq.num_prefilled)]
        rows = []
        for pool in pools:
            flat = np.asarray(pool)[:, 0, 0].reshape(-1, pool.shape[-1])
            rows.append(flat[locs])
        carry = jax.device_get(engine._programs.state.future_map.carry)["checksum"][seq.slot]
        edges.append((seq.num_prefilled, rows, carry))
    return edges


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16])
def test_state_at_every_edge_equals_that_of_the_whole_prompt(budget):
    """The last row's next token too, which an EAGLE-like drafter keeps."""
    asked = request("a", LONG)
    ((_, whole, carry),) = states_at_edges(
        make_engine(prefill_buckets=(8,), max_num_batched_tokens=32), asked
    )
    edges = states_at_edges(make_engine(max_num_batched_tokens=budget), asked)
    assert len(edges) == -(-len(LONG) // budget)
    for count, rows, _ in edges:
        for got, want in zip(rows, whole, strict=True):
            # What follows the prompt is known once its end has been computed.
            assert got.tolist() == want[:count].tolist()
    assert edges[-1][2].tolist() == carry.tolist()
