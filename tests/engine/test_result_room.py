"""Small results lie in places of their own, so that a step's graph is launched as it is."""

import runpy
from pathlib import Path

import chex
import jax.numpy as jnp
import pytest

from jaxspec.engine.result_room import make_room_for_results

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "command_buffers.py"


def test_what_keeps_the_places_apart_is_small():
    kept = make_room_for_results()
    assert 1 < len(kept) < 100
    for array in kept:
        chex.assert_shape(array, (4096,))
        chex.assert_type(array, jnp.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["smollm2-135m:none:1", "smollm2-135m:dflash:1"])
def test_graphs_are_launched_as_they_were_recorded(case):
    row = runpy.run_path(str(SCRIPT))["count"](case)
    assert row["launches_of_graphs"] == row["steps"]
    assert row["graphs_recorded"] == 0
    assert row["median_commands_updated"] < row["commands"] / 4, row
