"""Arrivals, chats, steps and aborts in any order, over few pages: texts are plain decoding's."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxspec.cache.page_pool import PagePool
from jaxspec.future_map import NON_FINITE_LOGITS
from jaxspec.request import FinishReason
from tests.engine.test_errors import engine_with_bad_states
from tests.fakes import NUM_STATES, VOCAB, PieceDetokenizer, checksum, letters
from tests.harness import (
    CONTEXT,
    DISPATCH,
    PAGE,
    drain,
    expected,
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
LETTERS = letters()


class EngineMachine(RuleBasedStateMachine):
    """One engine of one geometry; its pool and its accept script are data, so nothing compiles."""

    engine = None

    @initialize(
        accepts=st.lists(st.integers(0, 7), min_size=1, max_size=6),
        overlap=st.booleans(),
        num_pages=st.sampled_from([12, 14, 17, 24, 36]),
        caching=st.sampled_from([True, True, True, False]),
        budget=st.sampled_from([DISPATCH, DISPATCH, 5, 1]),
        chunked=st.sampled_from([True, True, False]),
        bad=st.sampled_from([(), (), (), (7,), (19, 40)]),
    )
    def start(self, accepts, overlap, num_pages, caching, budget, chunked, bad=()):
        """bad: states of the target whose logits are not finite."""
        self.accepts, self.bad = accepts, bad
        self.engine = engine_with_bad_states(
            *bad,
            accepts=accepts,
            overlap=overlap,
            prefix_caching=caching,
            max_num_batched_tokens=budget,
            chunked_prefill=chunked,
            make_detokenizer=lambda request: PieceDetokenizer(LETTERS),
        )
        self.engine._use_pool(PagePool(1 + num_pages))
        self.asked, self.outputs, self.aborted = {}, {}, {}

    def ask(self, prompt, copies=1, **params):
        for index in range(copies):
            name = f"r{len(self.asked)}"
            asked = request(name, prompt, **params)
            self.asked[name] = dataclasses.replace(asked, copy_index=index)
            self.engine.add_request(self.asked[name])

    @rule(
        length=lengths,
        first=st.integers(0, 2),
        stride=st.integers(0, 3),
        last=st.integers(0, VOCAB - 1),
        limit=st.one_of(st.none(), st.integers(1, 20)),
        stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        stop=st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), max_size=2),
        ignore_eos=st.booleans(),
        sampling=samplings,
        seed=st.integers(0, 2**64 - 1),
        copies=st.sampled_from([1, 1, 1, 2]),
    )
    def arrive(
        self, length, first, stride, last, limit, stop_ids, stop, ignore_eos, sampling, seed, copies
    ):
        """Prompts begin in one of a few ways, and end otherwise."""
        prompt = [(first + stride * i) % VOCAB for i in range(length - 1)]
        self.ask(
            [*prompt, last],
            max_tokens=limit,
            stop_token_ids=stop_ids,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            copies=copies,
            **sampling,
        )

    @precondition(lambda self: any(output.finished for output in self.outputs.values()))
    @rule(data=st.data(), turn=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    def answer_back(self, data, turn):
        """The next turn of a chat: its prompt begins with an answer."""
        names = sorted(name for name, output in self.outputs.items() if output.finished)
        name = data.draw(st.sampled_from(names))
        prompt = [*self.asked[name].prompt_token_ids, *tokens_of(self.outputs[name]), *turn]
        self.ask(prompt[: CONTEXT - 1], max_tokens=6)

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
        before = self.outputs.get(name)
        if before is not None:
            assert output.outputs[0].text.startswith(before.outputs[0].text), "text is taken back"
        self.outputs[name] = output
        want, _ = self.wanted(name)
        assert tokens_of(output) == want[: len(tokens_of(output))]

    def wanted(self, name):
        """What plain decoding makes of a request."""
        tokens, reason = self.stopped(name)
        text = [*self.asked[name].prompt_token_ids, *tokens]
        for place in range(len(tokens)):
            before = text[: len(text) - len(tokens) + place]
            if checksum(before) * 2 % NUM_STATES in self.bad:
                return tokens[:place], FinishReason.ERROR
        return tokens, reason

    def stopped(self, name):
        """The text of logits that are all finite, cut where a stop string is complete."""
        asked = self.asked[name]
        plain = expected(asked)
        text = "".join(LETTERS[token].decode() for token in plain)
        ends = [text.index(stop) + 1 for stop in asked.params.stop if stop in text]
        ends = [end for end in ends if end < len(plain) or plain.finish_reason == "length"]
        if not ends:
            return list(plain), plain.finish_reason
        return list(plain)[: min(ends)], FinishReason.STOP

    @invariant()
    def nobody_overtakes(self):
        if self.engine is None:
            return
        known = [self.engine._running.values(), self.engine._prefilling, self.engine._waiting]
        came = [int(seq.request.request_id[1:]) for seqs in known for seq in seqs]
        assert came == sorted(came)

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
        prefixes = engine._pages.prefixes
        for seq in holders.values():
            shared = [place for place, page in enumerate(seq.pages) if owned[page] > 1]
            assert all((place + 1) * PAGE <= seq.prefill_len for place in shared), (
                "a page has two owners and is yet to be written"
            )
        if prefixes is not None:
            prefixes.check()
        assert sorted([*holders, *engine._free_slots]) == [1, 2, 3]
        for slot, seq in holders.items():
            row = engine._pages.table[slot]
            assert row[: len(seq.pages)].tolist() == seq.pages
            assert not row[len(seq.pages) :].any()
            written = seq.num_prefilled
            if slot in engine._running:
                written = int(engine._published_lens[slot] + engine._in_flight_rows[slot])
            if seq.is_over:
                written = 0  # what is in flight of it went with the pages that it had
            assert len(seq.pages) * PAGE >= written, "KV may be written past the row's pages"
        assert not np.any(engine._pages.table[engine._free_slots]), "a free slot has pages"

    def teardown(self):
        if self.engine is None:
            return
        for output in drain(self.engine, max_steps=5000).values():
            self.note(output)
        self.engine.check_idle()
        errors = np.asarray(self.engine._programs.state.future_map.errors)
        assert not (errors & ~(NON_FINITE_LOGITS if self.bad else 0)).any()
        for name, asked in self.asked.items():
            want, reason = self.wanted(name)
            if name in self.aborted:
                output = self.aborted[name]
                assert output.outputs[0].finish_reason is FinishReason.ABORT
                assert tokens_of(output) == want[: len(tokens_of(output))]
                continue
            output = self.outputs[name]
            assert output.finished
            assert tokens_of(output) == want
            assert output.outputs[0].finish_reason == reason
            if not output.metrics.num_preemptions and reason != FinishReason.ERROR:
                got = output.metrics.accept_lengths
                lengths = scripted_accept_lengths(asked, self.accepts)
                if self.bad:  # behind the end no draft may be right
                    got, lengths = got[:-1], lengths[:-1]
                assert got == (lengths[: len(got)] if asked.params.stop else lengths)


COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=100, stateful_step_count=15, derandomize=True, **COMMON
)


@pytest.mark.nightly
def test_two_thousand_schedules():
    longer = settings(max_examples=2000, stateful_step_count=30, print_blob=True, **COMMON)
    run_state_machine_as_test(EngineMachine, settings=longer)
