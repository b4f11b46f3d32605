"""The README's tables are what the script makes of the results that are kept."""

from __future__ import annotations

import importlib.util
import json
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


def test_a_sweep_has_a_line_a_batch_and_says_where_there_was_no_room(monkeypatch, tmp_path):
    row = {"shape": "qwen3-8b", "step": "plain", "launches": 344, "ms": 4.2, "ratio": 1.2}
    places = ((1, 1024), (8, 1024), (1, 4096))
    rows = [{**row, "batch": batch, "prompt_len": length} for batch, length in places]
    rows.append({**rows[0], "step": "plain prefill", "launches": None})
    (tmp_path / "roofline_sweep.json").write_text(json.dumps({"rows": rows}))
    script = load_script()
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    head, _, *lines = script.sweep().splitlines()
    assert head == "| ms (ratio to the floor) | batch | 1,024 | 4,096 |"
    assert lines == [
        "| Qwen3-8B, plain | 1 | 4.20 (1.20) | 4.20 (1.20) |",
        "| Qwen3-8B, plain | 8 | 4.20 (1.20) | no room |",
    ]
