"""Which kernels a program launches, how often a call, and how long they take."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kernels_pallas.measure import kernel_durations


def profile_calls(call: Callable[[], Any], num_calls: int) -> list[dict[str, Any]]:
    """Profiles calls and sums up their kernels, the most time first.

    Kernels that differ by a running number only are one row: {"kernel", "launches" a call, "us" of
    one launch (median), "us_per_call"}. Empty where the device has no such profile, as a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(num_calls):
                result = call()
            jax.block_until_ready(result)
        planes = [
            plane
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        ]
        durations = kernel_durations(planes)
    grouped: dict[str, list[float]] = {}
    for name, times in durations.items():
        grouped.setdefault(family(name), []).extend(times)
    rows = [
        {
            "kernel": name,
            "launches": len(times) / num_calls,
            "us": statistics.median(times),
            "us_per_call": sum(times) / num_calls,
        }
        for name, times in grouped.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_call"])


def family(kernel: str) -> str:
    """The name of a kernel without the numbers that tell its copies apart.

    Example: "loop_add_fusion_12" and "loop_add_fusion" are both "loop_add_fusion".
    """
    return re.sub(r"([._]\d+)+$", "", kernel)
