"""How long a kernel takes on the device, and where the benches write it down."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

from kernels_pallas import dispatch

Row = dict[str, Any]


class Timing(NamedTuple):
    """One call's time on the device."""

    us: float  # sum over kernels of median duration * launches a call
    launches: float  # kernels and copies a call
    clock: str  # "profiler", or "wall" where the device is a CPU
    kernels: dict[str, float]  # median us of each kernel


def device_time(function: Callable[..., Any], *args: Any, repeats: int = 50) -> Timing:
    """Times a function on the device by the profiler, without host and launch gaps.

    A chain of such small kernels is bound by launches, so that wall-clock time says nothing of
    their own duration; the profiler's kernel events do. It needs no jit around a chain: each call
    is launched on its own. On a CPU, wall-clock time of a call stands in.

    Args:
      function: traceable; jitted here.
      *args: its arguments, on the device.
      repeats: profiled calls, after two calls that warm up.

    Raises:
      RuntimeError: the profiler saw no kernel.
    """
    run = jax.jit(function)
    for _ in range(2):
        jax.block_until_ready(run(*args))
    if jax.devices()[0].platform == "cpu":
        return _wall_time(run, args, repeats)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                results = run(*args)
            jax.block_until_ready(results)
        profiles = [
            jax.profiler.ProfileData.from_file(str(path))
            for path in Path(folder).rglob("*.xplane.pb")
        ]
    durations = kernel_durations(plane for profile in profiles for plane in profile.planes)
    if not durations:
        raise RuntimeError(
            "the profiler recorded no kernel on the device; check that CUPTI is installed and may "
            "be used by this user"
        )
    medians = {name: statistics.median(times) for name, times in durations.items()}
    launches = {name: len(times) / repeats for name, times in durations.items()}
    return Timing(
        us=sum(medians[name] * launches[name] for name in medians),
        launches=sum(launches.values()),
        clock="profiler",
        kernels=medians,
    )


def kernel_durations(planes: Iterable[Any]) -> dict[str, list[float]]:
    """Durations in us of every kernel and copy on the GPU's streams, by name."""
    durations: dict[str, list[float]] = {}
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # the others repeat the same time by module
                continue
            for event in line.events:
                durations.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return durations


def _wall_time(run, args, repeats) -> Timing:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(statistics.median(times), 1.0, "wall", {})


def bench_cases(
    op: str,
    cases: Iterable[Any],
    repeats: int = 50,
    keep: Callable[[Any], Any] = lambda results: results,
) -> list[Row]:
    """Times the reference and the best kernel here of an op, after the self-test of each case.

    Args:
      op: name of the op.
      cases: some of its own, or like them.
      repeats: profiled calls of each.
      keep: drops from the results what a step updates in place, and would be copied here.
    """
    best = dispatch.pick(op).name
    rows = []
    for case in cases:
        dispatch.self_test(op, best, case)
        args, static = dispatch.cases_module(op).make_inputs(case)
        for implementation in dict.fromkeys((dispatch.XLA, best)):
            run = functools.partial(dispatch.function(op), implementation=implementation, **static)
            timing = device_time(lambda *args, run=run: keep(run(*args)), *args, repeats=repeats)
            rows.append(
                {
                    "op": op,
                    "case": case.name,
                    "implementation": implementation,
                    "us": round(timing.us, 3),
                    "launches": timing.launches,
                    "clock": timing.clock,
                }
            )
    return rows


def write_results(folder: Path, op: str, rows: list[Row]) -> None:
    """Writes an op's rows as the README's tables read them: with all that they depend on."""
    results = {
        "command": f"python -m kernels_pallas.{op}.bench",
        "device": dispatch.Device.current().kind,
        "versions": {
            "python": sys.version.split()[0],
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"kernels_{op}.json").write_text(json.dumps(results, indent=1) + "\n")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a plain table; columns in the order they first appear."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(key, "")) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(op: str, bench: Callable[[], list[Row]], argv: list[str] | None = None) -> None:
    """The command line of a `bench.py`: prints its table and writes `--out`/kernels_<op>.json."""
    parser = argparse.ArgumentParser(prog=f"python -m kernels_pallas.{op}.bench")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    args = parser.parse_args(argv)
    rows = bench()
    print(table(rows))
    if args.out is not None:
        write_results(args.out, op, rows)
