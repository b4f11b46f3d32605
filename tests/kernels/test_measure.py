from __future__ import annotations

import json
from types import SimpleNamespace as Namespace

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import bench_all, dispatch, measure
from kernels_pallas.accept import bench, cases


def event(name, us):
    return Namespace(name=name, duration_ns=us * 1e3)


PLANES = [
    Namespace(name="/host:CPU", lines=[Namespace(name="Stream", events=[event("host", 9)])]),
    Namespace(
        name="/device:GPU:0",
        lines=[
            Namespace(name="Stream #13(Compute)", events=[event("a", 2.0), event("a", 4.0)]),
            Namespace(name="Stream #14(MemcpyD2D)", events=[event("copy", 1.5)]),
            Namespace(name="XLA Modules", events=[event("jit_f", 50)]),
        ],
    ),
]


def test_only_kernels_on_the_devices_streams_are_counted():
    assert measure.kernel_durations(PLANES) == {"a": [2.0, 4.0], "copy": [1.5]}


def test_a_call_on_a_cpu_is_timed_by_the_wall_clock(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Namespace(platform="cpu")])
    timing = measure.device_time(lambda x: x + 1, jnp.zeros(3), repeats=3)
    assert timing.clock == "wall"
    assert timing.us > 0


def test_a_profile_without_kernels_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Namespace(platform="gpu")])
    monkeypatch.setattr(measure, "kernel_durations", lambda planes: {})
    with pytest.raises(RuntimeError, match="the profiler recorded no kernel on the device; check"):
        measure.device_time(lambda x: x + 1, jnp.zeros(3), repeats=1)


def test_a_call_costs_each_kernels_median_times_its_launches(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Namespace(platform="gpu")])
    events = {"a": [1.0, 1.0, 9.0, 1.0], "b": [3.0, 5.0]}
    monkeypatch.setattr(measure, "kernel_durations", lambda planes: events)
    timing = measure.device_time(lambda x: x + 1, jnp.zeros(3), repeats=2)
    assert timing == (2 * 1.0 + 4.0, 3.0, "profiler", {"a": 1.0, "b": 4.0})


def test_a_bench_writes_its_rows_with_what_they_depend_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BENCH_CASES", cases.BENCH_CASES[:1])
    measure.main("accept", bench.bench, ["--out", str(tmp_path)])
    assert "batch 1" in capsys.readouterr().out
    results = json.loads((tmp_path / "kernels_accept.json").read_text())
    assert set(results) == {"command", "device", "versions", "date", "rows"}
    assert results["command"] == "python -m kernels_pallas.accept.bench"
    assert results["device"] == dispatch.Device.current().kind
    assert results["versions"]["jax"] == jax.__version__
    assert results["rows"][0]["implementation"] == "xla"
    assert results["rows"][0]["us"] > 0


def test_all_benches_run_although_one_fails(tmp_path, monkeypatch, capsys):
    from kernels_pallas.resolve_future import bench as broken

    def fail():
        raise RuntimeError("no luck")

    monkeypatch.setattr(broken, "bench", fail)
    monkeypatch.setattr(bench, "BENCH_CASES", cases.BENCH_CASES[:1])
    assert bench_all.main(["resolve_future", "accept", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kernels_accept.json"]
    out = capsys.readouterr()
    assert "no luck" in out.err
    assert out.err.endswith("failed: resolve_future\n")


def test_a_table_has_a_column_for_every_key():
    rows = [{"op": "accept", "us": 2.0}, {"op": "x", "batch": 8}]
    assert measure.table(rows) == "op      us  batch\naccept  2\nx           8"
