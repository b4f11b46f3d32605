"""Arrivals, steps and aborts in any order: every request ends as plain decoding does."""

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxspec.cache.page_pool import PagePool
from jaxspec.request import FinishReason
from tests.fakes import VOCAB
from tests.harness import (
    CONTEXT,
    DISPATCH,
    PAGE,
    drain,
    expected,
    make_engine,
    request,
    scripted_accept_lengths,
    tokens_of,
)

# Lengths around pages, prefill tiles and the context; tokens few, so that n-grams repeat.
lengths = st.sampled_from(
    [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, DISPATCH, DISPATCH + 1, CONTEXT - 2, CONTEXT - 1]
)
samplings = st.sampled_from(
    [
        dict(temperature=0.0),
        dict(temperature=0.7),
        dict(temperature=1.2, top_k=4),
        dict(temperature=0.9, top_p=0.6, min_p=0.05),
    ]
)


class EngineMachine(RuleBasedStateMachine):
    """One engine of one geometry; its pool and its accept script are data, so nothing compiles."""

    engine = None

    @initialize(
        accepts=st.lists(st.integers(0, 7), min_size=1, max_size=6),
        overlap=st.booleans(),
        num_pages=st.sampled_from([12, 17, 24, 36]),
    )
    def start(self, accepts, overlap, num_pages):
        self.accepts = accepts
        self.engine = make_engine(accepts=accepts, overlap=overlap)
        self.engine._use_pool(PagePool(1 + num_pages))
        self.asked, self.outputs, self.aborted = {}, {}, {}

    @rule(
        length=lengths,
        first=st.integers(0, VOCAB - 1),
        stride=st.integers(0, 3),
        limit=st.one_of(st.none(), st.integers(1, 20)),
        stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        ignore_eos=st.booleans(),
        sampling=samplings,
        seed=st.integers(0, 2**64 - 1),
    )
    def arrive(self, length, first, stride, limit, stop_ids, ignore_eos, sampling, seed):
        name = f"r{len(self.asked)}"
        self.asked[name] = request(
            name,
            [(first + stride * i) % VOCAB for i in range(length)],
            max_tokens=limit,
            stop_token_ids=stop_ids,
            ignore_eos=ignore_eos,
            seed=seed,
            **sampling,
        )
        self.engine.add_request(self.asked[name])

    @rule(count=st.integers(1, 4))
    def go_on(self, count):
        for _ in range(count):
            for output in self.engine.step():
                self.note(output)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        over = name in self.aborted or self.finished(name)
        output = self.engine.abort(name)
        assert (output is None) == over
        if output is not None:
            self.aborted[name] = output

    def finished(self, name):
        return name in self.outputs and self.outputs[name].finished

    def note(self, output):
        name = output.request_id
        assert name not in self.aborted, "an aborted request is reported again"
        assert not self.finished(name), "a finished request is reported again"
        self.outputs[name] = output
        want = list(expected(self.asked[name]))
        assert tokens_of(output) == want[: len(tokens_of(output))]

    @invariant()
    def pages_and_slots_add_up(self):
        if self.engine is None:
            return
        engine = self.engine
        engine._pages.pool.check()
        holders = {seq.slot: seq for seq in [*engine._running.values(), *engine._prefilling]}
        for dispatch in engine._in_flight:
            holders |= {seq.slot: seq for seq, _ in dispatch.entries}
        holders.pop(0, None)
        owned = Counter(page for seq in holders.values() for page in seq.pages)
        assert len(owned) + engine.num_free_pages == engine._pages.pool.num_usable
        assert all(engine._pages.pool._owners[page] == count for page, count in owned.items())
        for page, count in owned.items():
            assert count == 1 or page in engine._pages.prefixes._nodes, "a page has two owners"
        engine._pages.prefixes.check()
        assert sorted([*holders, *engine._free_slots]) == [1, 2, 3]
        for slot, seq in holders.items():
            row = engine._pages.table[slot]
            assert row[: len(seq.pages)].tolist() == seq.pages
            assert not row[len(seq.pages) :].any()
            written = seq.num_prefilled
            if slot in engine._running:
                written = int(engine._published_lens[slot] + engine._in_flight_rows[slot])
            assert len(seq.pages) * PAGE >= written, "KV may be written past the row's pages"
        assert not np.any(engine._pages.table[engine._free_slots]), "a free slot has pages"

    def teardown(self):
        if self.engine is None:
            return
        for output in drain(self.engine).values():
            self.note(output)
        self.engine.check_idle()
        for name, asked in self.asked.items():
            want = expected(asked)
            if name in self.aborted:
                output = self.aborted[name]
                assert output.outputs[0].finish_reason is FinishReason.ABORT
                assert tokens_of(output) == list(want)[: len(tokens_of(output))]
                continue
            output = self.outputs[name]
            assert output.finished
            assert tokens_of(output) == list(want)
            assert output.outputs[0].finish_reason == want.finish_reason
            if not output.metrics.num_preemptions:
                lengths = scripted_accept_lengths(asked, self.accepts)
                assert output.metrics.accept_lengths == lengths


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
