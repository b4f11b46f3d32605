"""Fewer drafts are verified, or none, where that is faster; text and state stay the same."""

import numpy as np
import pytest

from jaxspec.engine.draft_record import DraftRecord
from jaxspec.engine.pace import Pace
from jaxspec.engine.warmup import warmup
from jaxspec.mode import Mode
from tests.engine.test_programs import compilations
from tests.harness import (
    BLOCK,
    PAGE,
    SCRIPT,
    check,
    drain,
    expected,
    make_engine,
    request,
    run,
    script_of,
    tokens_of,
)

WIDTHS = (8, 4, 1)


class Forced(Pace):
    """Takes widths from a list."""

    def __init__(self, *widths):
        super().__init__(WIDTHS, BLOCK - 1)
        self._list, self.chosen = widths, []

    def choose(self, batch, records=(), *, may_try=False):
        self.chosen.append(self._list[len(self.chosen) % len(self._list)])
        return self.chosen[-1]


def accept_lengths_of(asked, accepts, widths):
    """What the scripted drafter must show when only so many of its drafts are verified."""
    script, lengths = script_of(accepts), []
    emitted, total, start = 1, len(expected(asked)), len(asked.prompt_token_ids)
    while emitted < total:
        width = widths[len(lengths) % len(widths)]
        lengths.append(int(min(script[start + emitted - 1], width - 1)) + 1)
        emitted += lengths[-1]
    return lengths


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("widths", [(1,), (4,), (8, 1), (1, 1, 8, 4), (4, 1, 1, 8, 8, 1)], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}], ids=str)
def test_a_drafter_drafts_on_after_steps_without_it(sampling, widths, overlap):
    """Its KV and its carry are those of one that always drafted, or no draft would be right."""
    engine = make_engine(pace=Forced(*widths), overlap=overlap)
    asked = request("a", [3, 1, 4], max_tokens=28, ignore_eos=True, **sampling)
    output = run(engine, asked)["a"]
    check({"a": output}, asked)
    lengths = output.metrics.accept_lengths
    assert lengths == accept_lengths_of(asked, SCRIPT, widths)
    drafted = [width - 1 for width, _ in zip(engine.pace.chosen, lengths, strict=False)]
    assert output.metrics.num_draft_tokens == sum(drafted)


def test_kv_and_carry_equal_those_of_always_drafting():
    """Every row of both, over widths that change in the middle of pages."""
    states = []
    for pace in (None, Forced(1, 4, 1, 8)):
        engine = make_engine(pace=pace, overlap=False, accepts=1)
        engine.add_request(request("a", [3, 1, 4], max_tokens=None, ignore_eos=True))
        rows = {}
        while engine._by_id:
            engine.step()
            if 1 in engine._running:
                seq, length = engine._running[1], int(engine._published_lens[1])
                pool = np.asarray(engine._programs.state.drafter_state[0])[:, 0, 0]
                locs = [seq.pages[p // PAGE] * PAGE + p % PAGE for p in range(length)]
                kv = pool.reshape(-1, pool.shape[-1])[locs].tolist()
                carry = np.asarray(engine._programs.state.future_map.carry["checksum"])[1].tolist()
                rows[length] = kv, carry
        states.append(rows)
    common = states[0].keys() & states[1].keys()
    assert len(common) > 3
    for length in common:
        assert states[0][length] == states[1][length]


def test_nothing_compiles_when_the_width_changes():
    """F27: all widths are compiled and timed before serving."""
    engine = make_engine(pace=Pace(WIDTHS, BLOCK - 1))
    warmup(engine, modes=(Mode.GREEDY,))
    batch = ("decode", Mode.GREEDY, 4)
    assert set(engine.pace._times) == {(batch, width) for width in WIDTHS}
    asked = [request(f"r{i}", [i, 5], max_tokens=20, ignore_eos=True) for i in range(6)]
    for each in asked:
        expected(each)
    compilations.clear()
    engine.pace.note_accepted(BLOCK, [(DraftRecord(), BLOCK - 1)])  # past its first steps
    for fastest in WIDTHS:
        for width in WIDTHS:
            engine.pace.set_time(batch, width, 1e-3 if width == fastest else 1.0)
        outputs = run(engine, *asked)
        check(outputs, *asked)
        drafted = sum(output.metrics.num_draft_tokens for output in outputs.values())
        verified = sum(output.metrics.num_verifies for output in outputs.values())
        assert abs(drafted / verified - (fastest - 1)) < 1.0
    assert compilations == []


@pytest.mark.parametrize("drafter", ["ngram", "random"])
def test_other_drafters_at_changing_widths(drafter):
    engine = make_engine(drafter, pace=Forced(1, 8, 4))
    asked = [request(f"r{i}", [i + 1, 7], max_tokens=20, ignore_eos=True) for i in range(4)]
    check(run(engine, *asked), *asked)


def test_an_engine_that_was_not_timed_verifies_all():
    engine = make_engine(pace=Pace(WIDTHS, BLOCK - 1))
    output = run(engine, request("a", [3], max_tokens=9, ignore_eos=True))["a"]
    assert output.metrics.num_draft_tokens == 7 * output.metrics.num_verifies
    drain(engine)
    assert len(tokens_of(output)) == 9


class Machine:
    """A make-believe machine: a step's time by batch and width, and drafts right so often."""

    def __init__(self, plain_ms, per_token_ms, draft_ms, seed=0):
        self.plain, self.per_token, self.draft = plain_ms, per_token_ms, draft_ms
        self.rng = np.random.default_rng(seed)

    def time(self, rows, width):
        draft = self.draft if width > 1 else 0.0
        return self.plain + draft + self.per_token * rows * width

    def accept(self, width, rate):
        wrong = self.rng.random(width - 1) >= rate
        return int(np.argmax(wrong)) if wrong.any() else width - 1

    def serve(self, pace, rows, rate, num_steps):
        """Tokens a millisecond."""
        tokens = elapsed = 0.0
        records = [DraftRecord() for _ in range(rows)]
        for _ in range(num_steps):
            width = pace.choose(rows, records) if isinstance(pace, Pace) else pace
            accepted = [self.accept(width, rate) for _ in range(rows)]
            took = self.time(rows, width) * self.rng.uniform(0.97, 1.03)
            if isinstance(pace, Pace):
                pace.note_time(rows, width, took)
                pace.note_accepted(width, [*zip(records, accepted, strict=True)])
            tokens += rows + sum(accepted)
            elapsed += took
        return tokens / elapsed


def timed(machine, batches=(1, 2, 4, 8, 16, 32, 64)):
    pace = Pace(WIDTHS, BLOCK - 1)
    for rows in batches:
        for width in WIDTHS:
            pace.set_time(rows, width, machine.time(rows, width))
    return pace


def nightly(value):
    return pytest.param(value, marks=pytest.mark.nightly)


@pytest.mark.parametrize("rate", [0.1, nightly(0.4), 0.6, nightly(0.8), 0.95])
@pytest.mark.parametrize("rows", [1, nightly(4), nightly(16), 64])
def test_a_sweep_follows_the_better_of_the_curves(rows, rate):
    """From the first step on, within 3 percent of plain decoding and of always drafting."""
    machine = Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0)
    best = max(machine.serve(width, rows, rate, 2000) for width in (8, 1))
    assert machine.serve(timed(machine), rows, rate, 2000) >= 0.97 * best


def test_a_draw_goes_to_plain_decoding():
    """Drafts are taken up again once they promise more than the 3 percent that may be lost."""
    pace = Pace((8, 1), BLOCK - 1)
    pace.set_time(8, 1, 1.0)
    pace.note_accepted(8, [(DraftRecord(), 7)])
    for promise, width in [(1.0, 1), (1.025, 1), (1.035, 8)]:
        pace.set_time(8, 8, pace.tokens_a_step(8) / promise)
        pace.choose(8)
        assert pace._width == width


def test_one_step_at_a_time_drafts_until_drafts_were_judged():
    """The steps beside it are plain, and it verifies the fewest drafts that there are to verify."""
    pace = timed(Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0))
    assert [pace.choose(8) for _ in range(4)] == [4, 1, 4, 1]
    pace.note_accepted(1, [(DraftRecord(), 0)] * 8)
    assert pace.choose(8) == 4
    pace.note_accepted(4, [(DraftRecord(), 3)] * 8)
    assert [pace.choose(8) for _ in range(2)] == [8, 8]


def test_an_unjudged_draft_is_thought_right_as_often_as_the_one_before_it():
    few_right, all_right = Pace(WIDTHS, BLOCK - 1), Pace(WIDTHS, BLOCK - 1)
    assert few_right.tokens_a_step(8) == 8.0
    for _ in range(20):
        few_right.note_accepted(4, [(DraftRecord(), count) for count in (0, 1, 2, 3)])
        all_right.note_accepted(4, [(DraftRecord(), 3)] * 4)
    assert all_right.tokens_a_step(8) == 8.0
    # Half of those that are reached are right on average, so that the next ones seldom are.
    assert 0.0 < few_right.tokens_a_step(8) - few_right.tokens_a_step(4) < 0.5


@pytest.mark.parametrize(("rate", "least"), [(0.2, 0.975), (0.5, 0.975), (0.95, 0.975)])
def test_the_first_answers_follow_the_better_curve(rate, least):
    """Times of SmolLM2-135M with DFlash on two CPU cores, a result read a step late, 100 steps."""
    seconds = {8: 0.173, 4: 0.120, 1: 0.0455}
    ratios = []
    for seed in range(12):
        machine = Machine(0.0, 0.0, 0.0, seed)
        speeds = []
        for fixed in (1, 8, None):
            pace = Pace(WIDTHS, BLOCK - 1)
            for width in WIDTHS:
                pace.set_time(8, width, seconds[width])
            tokens, elapsed, landing = 0, 0.0, []
            records = [DraftRecord() for _ in range(8)]
            for _ in range(100):
                width = fixed or pace.choose(8, records)
                accepted = [machine.accept(width, rate) for _ in range(8)]
                tokens += 8 + sum(accepted)
                elapsed += seconds[width]
                landing.append((width, accepted))
                if len(landing) > 1:
                    width, accepted = landing.pop(0)
                    pace.note_time(8, width, seconds[width])
                    pace.note_accepted(width, [*zip(records, accepted, strict=True)])
            speeds.append(tokens / elapsed)
        ratios.append(speeds[2] / max(speeds[:2]))
    assert np.mean(ratios) >= least


def test_drafting_resumes_when_it_pays_again():
    machine = Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0)
    pace = timed(machine)
    machine.serve(pace, 8, 0.02, 1000)
    assert pace._width == 1
    machine.serve(pace, 8, 0.95, 400)
    assert pace._width == 8
    machine.serve(pace, 8, 0.02, 400)
    assert pace._width == 1


def test_a_shorter_width_is_taken_before_none():
    """Two drafts in a row are right and the third never is."""
    machine = Machine(plain_ms=5.0, per_token_ms=0.2, draft_ms=0.5)
    machine.accept = lambda width, rate: min(2, width - 1)
    pace = timed(machine)
    machine.serve(pace, 16, 1.0, 500)
    assert pace._width == 4


def test_batches_of_different_sizes_are_judged_apart():
    machine = Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0)
    pace = timed(machine)
    machine.serve(pace, 64, 0.6, 300)
    assert pace._width < 8
    machine.serve(pace, 1, 0.6, 300)
    assert pace._width == 8


def test_a_pause_of_the_machine_is_no_step_time():
    pace = timed(Machine(5.0, 0.05, 1.0))
    before = dict(pace._times)
    pace.note_time(1, 8, 1e6)
    pace.note_time("unknown", 8, 1.0)
    assert pace._times == before


def test_what_slows_all_steps_alike_changes_no_choice():
    """Twice as slow for a while, at random: only steps beside each other are compared."""
    machine = Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0)
    quiet = machine.time
    pace = timed(machine)
    machine.serve(pace, 8, 0.02, 300)
    before = {width: pace._times[8, width] for width in WIDTHS}
    machine.time = lambda rows, width: 2.5 * quiet(rows, width)
    machine.serve(pace, 8, 0.02, 300)
    after = [pace._times[8, width] / before[width] for width in WIDTHS]
    assert max(after) / min(after) < 1.15
    assert pace._width == 1


@pytest.mark.parametrize("mistaken", [1, 8])
def test_a_wrong_measurement_at_warm_up_is_found_out(mistaken):
    """A width thought thrice as slow as it is is probed all the same, and then taken."""
    machine = Machine(plain_ms=5.0, per_token_ms=0.05, draft_ms=1.0)
    rate = 0.02 if mistaken == 1 else 0.9
    pace = timed(machine)
    pace.set_time(8, mistaken, 3 * machine.time(8, mistaken))
    pace.set_time(8, 4, 3 * machine.time(8, 4))
    machine.serve(pace, 8, rate, 1500)
    assert pace._width == mistaken


def test_probes_cost_three_thousandths():
    machine = Machine(plain_ms=5.0, per_token_ms=0.3, draft_ms=1.0)
    best = machine.serve(1, 8, 0.02, 3000)
    pace = timed(machine)
    machine.serve(pace, 8, 0.02, 100)
    assert best * 0.993 < machine.serve(pace, 8, 0.02, 3000) < best * 0.9995


def test_a_batch_is_judged_by_the_records_of_its_requests():
    """Of equal batches the one that copies its prompts is drafted for, the other is not."""
    machine = Machine(plain_ms=5.0, per_token_ms=0.2, draft_ms=2.0)
    pace = timed(machine)
    machine.serve(pace, 2, 0.35, 500)
    copying, free = DraftRecord(), DraftRecord()
    for _ in range(10):
        copying.note(7, 0.5)
        free.note(0, 0.5)
    for records, width in [((free, free), 1), ((copying, copying), 8), ((free, free), 1)]:
        pace.choose(2, records)
        assert pace._width == width


def test_requests_that_are_drafted_for_by_their_records_say_less_of_others():
    """Else copies alone would be drafted for, and all others thought to be like them."""
    known = []
    for is_copying in (False, True):
        pace = Pace(WIDTHS, BLOCK - 1)
        for _ in range(200):
            pace.note_accepted(8, [(DraftRecord(), 0)])
        record = DraftRecord()
        for _ in range(20 if is_copying else 0):
            record.note(7, 0.5)
        pace.note_accepted(8, [(record, 7)])
        known.append(pace.tokens_a_step(8) - 1)
    assert 0 < 3 * known[1] < known[0]


def test_a_record_fades():
    record = DraftRecord()
    assert record.factor == 1.0
    for _ in range(10):
        record.note(7, 1.0)
    assert record.factor > 3.0
    for _ in range(100):
        record.note(0, 0.0)
    assert abs(record.factor - 1.0) < 0.1


def test_a_request_keeps_its_record_when_it_is_preempted():
    engine = make_engine(pace=Pace(WIDTHS, BLOCK - 1), accepts=0)
    engine.add_request(request("a", [3, 1, 4], max_tokens=20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    record = engine._running[1].draft_record
    engine._preempt(engine._running[1])
    assert engine._waiting[0].draft_record is record
    assert record.factor < 1.0
    drain(engine)


def test_an_engine_that_compiles_when_asked_tries_plain_decoding_once_drafts_fail():
    """Texts and KV stay right, and full steps come again now and then."""
    engine = make_engine(pace=Pace(WIDTHS, BLOCK - 1), accepts=0)
    asked = [request(f"r{i}", [i + 1, 7], max_tokens=28, ignore_eos=True) for i in range(6)]
    check(run(engine, *asked), *asked)
    batch = ("decode", Mode.GREEDY, 4)
    assert {width for name, width in engine.pace._times if name == batch} == {8, 1}
    assert engine.stats.num_draft_tokens < 7 * engine.stats.num_verifies


def test_an_engine_that_compiles_when_asked_drafts_on_while_drafts_are_right():
    engine = make_engine(pace=Pace(WIDTHS, BLOCK - 1), accepts=5)
    asked = [request(f"r{i}", [i + 1, 7], max_tokens=28, ignore_eos=True) for i in range(20)]
    check(run(engine, *asked), *asked)
    assert engine.stats.num_draft_tokens == 7 * engine.stats.num_verifies


def test_programs_are_never_compiled_late_once_others_were_warmed_up():
    """F27: a mode that was not warmed up compiles its own program and no other."""
    pace = Pace(WIDTHS, BLOCK - 1)
    for _ in range(40):
        assert pace.choose("late") == 8
        pace.note_time("late", 8, 0.01)
        pace.note_accepted(8, [(DraftRecord(), 0)])
    assert pace.choose("late", may_try=True) == 1
