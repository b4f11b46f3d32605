"""Makes the README's tables of whole steps from the JSON of their runs.

python benchmarks/tables.py            # prints them
python benchmarks/tables.py --write    # puts them in README.md, between their marks
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_SHAPES = {"qwen3-8b": "Qwen3-8B", "smollm2-135m": "SmolLM2-135M"}


def steps() -> str:
    """Steps with the defaults, and what they would be with one thing else."""
    results = _read("step_variants")
    lines = [
        "| step | batch | ms | floor ms | ratio | launches | dispatch ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = results["rows"]
    order = list(_SHAPES), ["plain", "dflash"]
    rows.sort(
        key=lambda row: (
            order[0].index(row["shape"]),
            order[1].index(row["step"]),
            row["batch"],
            row["decode_steps"],
            len(row["changes"]),
        )
    )
    for row in rows:
        launches = "-" if row["launches"] is None else f"{row['launches']:.0f}"
        lines.append(
            f"| {_SHAPES[row['shape']]}, {row['step']}{_changes(row)} | {row['batch']} "
            f"| {row['ms']:.2f} | {row['floor_ms']:.2f} | {row['ratio']:.2f} | {launches} "
            f"| {row['dispatch_ms']:.2f} |"
        )
    return "\n".join(lines)


def programs() -> str:
    """What each program launches, copies and updates in place."""
    lines = [
        "| program | launches | command buffers | outside of them | state updated in place "
        "| copies as large as a layer's KV | launch the next early | of these read by XLA |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _read("gpu_programs")["rows"]:
        aliased = row["aliased_bytes"] / row["state_bytes"]
        lines.append(
            f"| `{row['program']}` | {row['launches']} | {row['command_buffers']} "
            f"| {row['outside_command_buffers']} | {aliased:.0%} | {row['kv_sized_copies']} "
            f"| {row['early']} | {row['early_read_by_xla']} |"
        )
    return "\n".join(lines)


def _changes(row: dict[str, Any]) -> str:
    names = dict(row["changes"])
    parts = [f"{row['decode_steps']} in a loop"] if row["decode_steps"] > 1 else []
    if "xla_gpu_enable_command_buffer" in names:
        parts.append("all of it in one command buffer")
    if names.get("few_row_gemm") == "xla":
        parts.append("products and norms by XLA")
    elif names.get("early_launch") is False:
        parts.append("no early launch")
    return f" ({', '.join(parts)})" if parts else ""


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


TABLES: dict[str, Callable[[], str]] = {"steps": steps, "programs": programs}


def written(text: str) -> str:
    """The README with its tables made anew."""
    for name, table in TABLES.items():
        block = f"<!-- table: {name} -->\n{table()}\n<!-- end -->"
        pattern = rf"<!-- table: {name} -->\n.*?<!-- end -->"
        text, count = re.subn(pattern, lambda _, block=block: block, text, flags=re.S)
        assert count == 1, f"the README has {count} places for the table {name}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them in README.md")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text()))
        return
    for table in TABLES.values():
        print(table(), end="\n\n")


if __name__ == "__main__":
    main()
