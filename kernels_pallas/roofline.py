"""Share of the memory's bandwidth that a kernel reaches: for benches of kernels that stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, measure

L2_BYTES = 60 << 20  # of an H200, the largest there is


def copy_bandwidth() -> float:
    """Bytes read and written per us by the device's own copy of a large array."""
    num_bytes = (4 << 30) if dispatch.Device.current().platform == "gpu" else (16 << 20)
    array = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    return 2 * num_bytes / measure.device_time(jnp.copy, array, repeats=5).us


def cold_sets(num_bytes: int) -> int:
    """How many sets of inputs of this size to rotate among, so that none is left in L2."""
    return min(16, 1 + -(-2 * L2_BYTES // num_bytes))


def cold_time(function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], repeats: int) -> float:
    """Device time in us of one call, each on other inputs than the one before."""

    def run(sets):
        return [function(*args) for args in sets]

    return measure.device_time(run, sets, repeats=repeats).us / len(sets)


def chained_time(
    function: Callable[[Any], Any], carry: Any, repeats: int, calls: int = 16
) -> float:
    """Device time in us of one call of a function that updates its argument in place.

    A jitted call would first copy what it does not own; of a chain in one program only the start is
    copied, and counts a sixteenth.
    """

    def run(carry):
        others = []
        for _ in range(calls):
            carry, other = function(carry)
            others.append(other)
        return carry, others

    return measure.device_time(run, carry, repeats=repeats).us / calls
