"""The scripts behind the README's pictures, and the pictures that they made."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
MAX_BYTES = 150_000
PNG = b"\x89PNG"


def draw(monkeypatch, script, *argv):
    monkeypatch.setattr(sys, "argv", [script, *map(str, argv)])
    return runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")


def test_every_picture_is_small_and_has_its_script():
    pictures = [path for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()]
    assert pictures
    for path in pictures:
        assert path.suffix == ".png"
        assert path.stat().st_size < MAX_BYTES
        assert path.with_suffix(".py").exists()


@pytest.mark.parametrize("script", ["accept_lengths", "attention_bandwidth", "step_floor"])
def test_kept_figures_are_drawn(script, monkeypatch, tmp_path):
    draw(monkeypatch, script, "--out", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)


def test_a_roofline_is_drawn(monkeypatch, tmp_path):
    row = {"shape": "qwen3-8b", "step": "plain", "batch": 1, "ms": 4.2, "floor_ms": 4.0}
    results = {"device": "NVIDIA H200", "date": "2026-12-02", "rows": [row]}
    (tmp_path / "roofline.json").write_text(json.dumps(results))
    draw(monkeypatch, "step_floor", tmp_path / "roofline.json", "--out", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)


def test_a_sweep_of_contexts_is_drawn(monkeypatch, tmp_path):
    rows = [
        {"shape": "qwen3-8b", "step": step, "batch": batch, "context": context, "ratio": 1.2}
        for step in ("plain", "dflash", "plain prefill")
        for batch in (1, 8)
        for context in (1024, 4096)
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    draw(monkeypatch, "step_sweep", tmp_path / "sweep.json", "--out", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_run_is_drawn(monkeypatch, tmp_path, capsys):
    options = ["--shape", "tiny", "--repeats", 1, "--num-steps", 3]
    draw(monkeypatch, "overlap_timeline", *options, "--out", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(PNG)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["no overlap", "overlap"]
