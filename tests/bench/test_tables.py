"""The README's tables are what the script makes of the results that are kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script():
    path = ROOT / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_holds_the_tables_of_the_results():
    readme = (ROOT / "README.md").read_text()
    assert load_script().written(readme) == readme


def test_every_program_updates_its_state_in_place_and_copies_no_kv():
    """As the results say; `benchmarks/gpu_programs.py` finds it out anew."""
    for row in load_script()._read("gpu_programs")["rows"]:
        assert row["aliased_bytes"] == row["state_bytes"], row["program"]
        assert row["kv_sized_copies"] == 0, row["program"]
        assert row["early_read_by_xla"] == 0, row["program"]
