"""When the device ran each program of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# The threads that run programs on a CPU, since jax 0.12 and before.
_CPU_CLIENTS = ("tf_XLAExecute", "tf_XLAPjRtCpuClient")
_BEGIN, _END = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"


class Interval(NamedTuple):
    """Microseconds on the profile's clock."""

    start_us: float
    end_us: float


def program_intervals(planes: Iterable[Any], num_programs: int) -> list[Interval]:
    """From the first to the last thing that the device did for each of its programs, in order.

    planes: of a profile in which the device ran `num_programs` times the same program and nothing
    else.

    Raises:
        RuntimeError: the profile cannot be divided into so many programs.
    """
    planes = list(planes)
    kernels = sorted(_kernels(planes))
    regions = sorted(_cpu_regions(planes)) if not kernels else []
    found = kernels or regions
    if not found or len(found) % num_programs:
        raise RuntimeError(
            f"the profile has {len(found)} kernels or programs, which is no multiple of the "
            f"{num_programs} programs that ran; profile again"
        )
    # The same program launches the same kernels each time, one program after the other.
    size = len(found) // num_programs
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    whole = [Interval(group[0].start_us, max(each.end_us for each in group)) for group in groups]
    # A program begins once the one before it has ended; on a CPU that one's thread may only be
    # late to say so.
    ends = [after.start_us for after in whole[1:]] + [float("inf")]
    return [
        Interval(each.start_us, min(each.end_us, end))
        for each, end in zip(whole, ends, strict=True)
    ]


def _kernels(planes: Iterable[Any]) -> Iterator[Interval]:
    """Kernels and copies on the streams of a GPU."""
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from (interval_of(event) for event in line.events)


def _cpu_regions(planes: Iterable[Any]) -> Iterator[Interval]:
    """Runs of programs on a CPU: from one region's begin to its end, a thread a line."""
    for plane in planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith(_CPU_CLIENTS):
                continue
            begin, events = None, sorted(line.events, key=lambda event: event.start_ns)
            for event in events:
                if event.name == _BEGIN:
                    begin = event.start_ns / 1e3
                elif event.name == _END and begin is not None:
                    yield Interval(begin, event.start_ns / 1e3)
                    begin = None
            if begin is not None:
                # Its results were there, and the profile ended, before its thread let go.
                yield Interval(begin, max(interval_of(event).end_us for event in events))


def interval_of(event: Any) -> Interval:
    """When an event of a profile was."""
    start = event.start_ns / 1e3
    return Interval(start, start + event.duration_ns / 1e3)
