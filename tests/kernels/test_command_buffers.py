"""A step's command buffer is launched as it was recorded, while an engine serves."""

import runpy
from pathlib import Path

import pytest

from kernels_pallas import dispatch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "command_buffers.py"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["smollm2-135m:none:1", "smollm2-135m:dflash:1", "smollm2-135m:none:8:logprobs"]
)
def test_graphs_are_launched_as_they_were_recorded(case):
    refusal = dispatch.refuses_triton(dispatch.Device.current())
    if refusal is not None:
        pytest.skip(f"lacks a GPU: {refusal}")
    rows = runpy.run_path(str(SCRIPT))["count"](case)
    for row in rows:
        assert row["launches_of_graphs"] == row["dispatches"] > 8
        assert row["graphs_recorded"] == 0
        assert row["median_commands_updated"] < row["commands"] / 3, row
    # Whoever else was served, a greedy batch costs what it cost before.
    assert rows[-1] == rows[0]
