"""Which program a name given to `benchmarks/gpu_programs.py` stands for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxspec.engine import steps

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_programs.py"


@pytest.mark.parametrize(
    ("kind", "program"),
    [("", "decode"), ("sampled", "decode"), ("4", "decode_loop"), ("prefill", "prefill")],
)
def test_a_step_is_one_step_unless_more_are_asked_for(monkeypatch, kind, program):
    spec = importlib.util.spec_from_file_location("gpu_programs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = steps.Steps(*steps.Steps._fields)
    monkeypatch.setattr(steps, "build_steps", lambda *args, **settings: names)
    found, _ = script._step("smollm2-135m", "none", 1, kind)
    assert found == program
