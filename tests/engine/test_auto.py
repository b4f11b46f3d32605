"""Whether `auto` drafts: the arithmetic, and what is remembered of a measurement."""

import time

import pytest

from jaxspec.engine import auto
from jaxspec.engine.auto import StepTimes, StepWatch, judge, measure_steps, remembered_times
from jaxspec.engine.pace import Pace
from jaxspec.mode import Mode
from tests.harness import BLOCK, make_engine, request, run, tokens_of


def test_a_drafter_pays_when_tokens_grow_faster_than_the_step():
    verdict = judge(StepTimes(plain_s=0.010, draft_s=0.015), 3.0)
    assert verdict.pays
    assert verdict.reason == (
        "auto: 3.00 tokens a step of 15.00 ms, plain 10.00 ms, so 2.00x plain decoding"
    )


@pytest.mark.parametrize("draft_s", [0.030, 0.040, 0.029])
def test_a_drafter_that_loses_or_draws_is_left_out(draft_s):
    assert not judge(StepTimes(plain_s=0.010, draft_s=draft_s), 3.0).pays


def test_times_are_measured_once_a_key(tmp_path):
    file = tmp_path / "deep" / "auto.json"
    measured = []

    def measure() -> StepTimes:
        measured.append(1)
        return StepTimes(0.5, 0.25)

    first = remembered_times(file, "a", measure)
    assert remembered_times(file, "a", measure) == first == StepTimes(0.5, 0.25)
    assert len(measured) == 1
    remembered_times(file, "b", measure)
    assert len(measured) == 2
    assert remembered_times(file, "a", measure) == first
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("passed_s", "holds"), [(3600.0, True), (2e5, True), (3e5, False), (-60.0, False)]
)
def test_a_measurement_is_made_again_after_some_days(tmp_path, monkeypatch, passed_s, holds):
    """The machine may have been busy; a clock that was set back says nothing either."""
    file, now = tmp_path / "auto.json", time.time()
    remembered_times(file, "a", lambda: StepTimes(2.0, 1.0))
    monkeypatch.setattr(time, "time", lambda: now + passed_s)
    later = StepTimes(9.0, 9.0)
    assert remembered_times(file, "a", lambda: later) == (StepTimes(2.0, 1.0) if holds else later)
    assert remembered_times(file, "a", lambda: StepTimes(7.0, 7.0)) != StepTimes(7.0, 7.0)


DAMAGED = ["", "{", "[]", '{"a": [1]}', '{"a": "x"}', '{"a": [0.0, 1.0, 1.0]}', '{"a": [3.0, 4.0]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_memory_is_measured_again(tmp_path, text):
    file = tmp_path / "auto.json"
    file.write_text(text)
    assert remembered_times(file, "a", lambda: StepTimes(2.0, 1.0)) == StepTimes(2.0, 1.0)
    assert remembered_times(file, "a", lambda: StepTimes(9.0, 9.0)) == StepTimes(2.0, 1.0)


def test_a_memory_that_cannot_be_written_costs_only_the_measurement(tmp_path):
    (tmp_path / "file").write_text("")
    file = tmp_path / "file" / "auto.json"
    assert remembered_times(file, "a", lambda: StepTimes(2.0, 1.0)) == StepTimes(2.0, 1.0)


BATCH = ("decode", Mode.GREEDY, 1)


def watch(file, seconds: float, batch=BATCH, num_steps: int = 64) -> None:
    """A session whose steps take so long."""
    session = StepWatch(file, "a")
    for _ in range(num_steps):
        session(batch, seconds)


def is_remembered(file) -> bool:
    """Whether a start would do without a measurement."""
    return "a" in auto._read(file)


@pytest.mark.parametrize(
    ("seconds", "holds"), [(1.0, True), (1.25, True), (0.8, True), (1.35, False), (0.7, False)]
)
def test_times_are_forgotten_when_steps_take_another_time_than_before(tmp_path, seconds, holds):
    file = tmp_path / "auto.json"
    remembered_times(file, "a", lambda: StepTimes(2.0, 1.0))
    watch(file, 1.0)
    assert remembered_times(file, "a", lambda: StepTimes(7.0, 7.0)) == StepTimes(2.0, 1.0)
    watch(file, seconds)
    assert is_remembered(file) == holds


def test_a_session_is_judged_by_enough_steps_of_one_request(tmp_path):
    file = tmp_path / "auto.json"
    remembered_times(file, "a", lambda: StepTimes(2.0, 1.0))
    watch(file, 1.0)
    watch(file, 9.0, num_steps=63)
    watch(file, 9.0, batch=("decode", Mode.GREEDY, 2))
    watch(file, 9.0, batch=("decode", Mode.SAMPLED, 1))
    assert is_remembered(file)


def test_what_others_have_forgotten_stays_forgotten(tmp_path):
    watch(tmp_path / "auto.json", 1.0)
    assert not (tmp_path / "auto.json").exists()


@pytest.mark.parametrize("drafter", ["none", "scripted"])
def test_an_engine_tells_who_watches_of_its_full_steps(drafter):
    seen = []
    engine = make_engine(drafter, watch_step=lambda *step: seen.append(step), accepts=2)
    run(engine, request("a", [5, 6, 7], max_tokens=20, ignore_eos=True))
    assert {batch for batch, _ in seen} == {("decode", Mode.GREEDY, 4)}
    assert 3 < len(seen) < engine.stats.num_decode_steps
    assert all(seconds > 0 for _, seconds in seen)


def test_measuring_steps_leaves_an_engine_as_it_was(monkeypatch):
    monkeypatch.setattr(auto, "_MEASURE_S", 0.0)
    engine = make_engine("scripted", accepts=3, pace=Pace((BLOCK, 1), BLOCK - 1))
    assert min(measure_steps(engine)) > 0
    alone = run(make_engine("scripted", accepts=3), request("a", [5, 6, 7]))
    assert tokens_of(run(engine, request("a", [5, 6, 7]))["a"]) == tokens_of(alone["a"])


def test_plain_and_drafted_steps_are_measured_in_turns(monkeypatch):
    """A machine that is busy in bursts slows both; the fastest of each is taken."""
    monkeypatch.setattr(auto, "_MEASURE_S", 0.0)
    widths, times = [], iter([9.0, 9.0, 1.0, 9.0, 9.0, 2.0, 9.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(auto, "warm_up_programs", lambda engine, programs: None)

    def timed(engine, program):
        widths.append(program.width)
        return next(times)

    monkeypatch.setattr(auto, "time_idle", timed)
    assert measure_steps(make_engine("scripted")) == StepTimes(1.0, 2.0)
    assert widths == [1, BLOCK] * 5
