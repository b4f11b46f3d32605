"""What is recorded of real steps of a tiny model: their timeline, and their row of the relay."""

import dataclasses

import pytest

from jaxspec.bench.rig import build_engine, load_rig, make_requests, run_workload
from jaxspec.config import EngineConfig
from jaxspec.pictures.record_timeline import record_timeline
from jaxspec.pictures.relay import watch_relay
from jaxspec.pictures.timeline import timeline_picture
from jaxspec.weights.files import no_progress
from tests.tiny_model import SIZES, write_tiny_model

STAGES = ["(before)", "resolve", "verify, publish", "ingest, stash"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=str(folder), drafter="ngram", poison=True, **SIZES)
    return load_rig(config, cache_dir=folder, on_progress=no_progress)


@pytest.fixture(scope="module")
def timelines(rig):
    return {
        overlap: record_timeline(rig, overlap=overlap, num_steps=3) for overlap in (False, True)
    }


def spans_of(timeline, what):
    found = [span for span in timeline.spans if span.what == what]
    return {span.step: (span.start_us, span.end_us) for span in found}


def test_every_step_is_dispatched_run_waited_for_and_committed(timelines):
    for overlap, timeline in timelines.items():
        # With overlap the one that was on its way at the start lands, and the last one is left.
        landed = [-1, 0, 1] if overlap else [0, 1, 2]
        assert sorted(spans_of(timeline, "dispatch")) == [0, 1, 2]
        assert sorted(spans_of(timeline, "device")) == [0, 1, 2]
        assert sorted(spans_of(timeline, "wait")) == landed
        assert sorted(spans_of(timeline, "commit")) == landed
        assert 0 < timeline.device_share <= 1
        for span in timeline.spans:
            assert 0 <= span.start_us <= span.end_us <= 3e3 * timeline.step_ms + 1e-3, span


def test_only_with_overlap_a_step_is_dispatched_before_the_last_one_is_read(timelines):
    for overlap, timeline in timelines.items():
        dispatch, wait = spans_of(timeline, "dispatch"), spans_of(timeline, "wait")
        for step in (1, 2):
            assert (dispatch[step][1] <= wait[step - 1][1]) is overlap


def test_the_device_runs_a_step_after_its_dispatch_began_and_before_it_has_landed(timelines):
    for timeline in timelines.values():
        dispatch, device = spans_of(timeline, "dispatch"), spans_of(timeline, "device")
        for step, (_, landed) in spans_of(timeline, "wait").items():
            if step >= 0:
                assert dispatch[step][0] <= device[step][0] <= landed
        assert device[0][1] <= device[1][0] <= device[1][1] <= device[2][0]


def test_a_timeline_is_drawn(timelines, tmp_path):
    picture = timeline_picture({str(name): line for name, line in timelines.items()}, "title")
    picture.save(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "False\nhost",
        "device",
        "True\nhost",
        "device",
    ]
    assert len(axes.patches) == sum(len(line.spans) for line in timelines.values())


def test_the_relay_is_seen_after_each_stage(rig):
    log = watch_relay(rig, "Abc", num_steps=2)
    assert [moment.after for moment in log[:4]] == STAGES
    assert len(log) == 8
    outside = rig.geometry.vocab_size
    for step in (0, 1):
        before, resolved, published, stashed = log[4 * step : 4 * step + 4]
        assert (resolved.token, resolved.length) == (outside, 0)  # spoilt, since it was read
        assert published.token == outside
        assert published.length > before.length
        assert stashed.length == published.length
        assert 0 <= stashed.token < outside
    assert log[4][2:4] == log[3][2:4]  # nothing happens between two steps
    assert "step  after" in repr(log)


def test_watching_changes_no_token(rig):
    (request,) = make_requests(rig, 1, max_tokens=40, ignore_eos=True)
    work = run_workload(build_engine(rig), [request], concurrency=1)
    tokens = work.outputs[0].outputs[0].token_ids
    log = watch_relay(rig, request.prompt, num_steps=4)
    first = log[0].length
    for moment in log:
        if moment.after in ("(before)", "ingest, stash"):
            assert moment.token == tokens[moment.length - first]


def test_loops_of_steps_are_recorded_too(rig):
    looped = rig._replace(geometry=dataclasses.replace(rig.geometry, decode_steps=2))
    timeline = record_timeline(looped, overlap=True, num_steps=2)
    assert sorted(spans_of(timeline, "device")) == [0, 1]
    wall_us = max(span.end_us for span in timeline.spans)
    assert timeline.step_ms == pytest.approx(wall_us / (2 * 2) / 1e3)  # of one step, not of a loop


def test_single_steps_are_watched_where_an_engine_would_run_loops(rig):
    looped = rig._replace(geometry=dataclasses.replace(rig.geometry, decode_steps=2))
    log = watch_relay(looped, "What is it?", num_steps=2)
    assert [moment.after for moment in log] == STAGES * 2
