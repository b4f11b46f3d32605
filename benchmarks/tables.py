"""Makes the README's tables from the JSON of these runs.

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
    """Decode steps through the engine, plain and with drafts, against the floor."""
    lines = [
        "| step | batch | ms | floor ms | ratio | idle, overlap on / off | dispatch ms | launches "
        "| tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _read("roofline")["rows"]:
        if row["launches"] is None:  # a prompt, not a step
            continue
        how = " split" * (row["form"] == "split")
        if row["decode_steps"] > 1:
            how += f", {row['decode_steps']} steps a dispatch"
        lines.append(
            f"| {_SHAPES[row['shape']]}, {row['step']}{how} | {row['batch']} "
            f"| {row['ms']:.2f} | {row['floor_ms']:.2f} | {row['ratio']:.2f} "
            f"| {row['idle_percent']:.0f} / {row['blocking_idle_percent']:.0f} % "
            f"| {row['dispatch_ms']:.2f} | {row['launches']:.0f} | {row['tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines)


def sweep() -> str:
    """Steps at other contexts and batch sizes; the context is that of the prompts."""
    rows = [row for row in _read("roofline_sweep")["rows"] if row["launches"] is not None]
    contexts = sorted({row["prompt_len"] for row in rows})
    lines = [
        f"| ms (ratio to the floor) | batch | {' | '.join(f'{c:,}' for c in contexts)} |",
        "| --- " * (len(contexts) + 2) + "|",
    ]
    found = {(row["step"], row["batch"], row["prompt_len"]): row for row in rows}
    for step, batch in dict.fromkeys((row["step"], row["batch"]) for row in rows):
        cells = []
        for context in contexts:
            row = found.get((step, batch, context))
            cells.append(f"{row['ms']:.2f} ({row['ratio']:.2f})" if row else "no room")
        lines.append(f"| {_SHAPES[rows[0]['shape']]}, {step} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prompts() -> str:
    """Prompts through the engine, to the first token on the host."""
    lines = ["| prompt | tokens | ms | floor ms | ratio |", "| --- | --- | --- | --- | --- |"]
    for row in _read("roofline")["rows"]:
        if row["launches"] is None:
            lines.append(
                f"| {_SHAPES[row['shape']]}, {row['step'].removesuffix(' prefill')} "
                f"| {row['context']:,} | {row['ms']:.1f} | {row['floor_ms']:.1f} "
                f"| {row['ratio']:.2f} |"
            )
    return "\n".join(lines)


def served() -> str:
    """Tokens a second of each drafter, at each number of requests at once, run by run."""
    runs = [run["rows"] for run in _read("throughput")]
    sizes = sorted({row["concurrency"] for row in runs[0]})
    heads = " | ".join(f"{size} at once" for size in sizes)
    lines = [
        f"| drafter, steps a dispatch | {heads} | accept length | ms a step |",
        "| --- " * (len(sizes) + 3) + "|",
    ]
    for rows in runs:
        lines += _served_by(rows)
    return "\n".join(lines)


def _served_by(rows: list[dict[str, Any]]) -> list[str]:
    """A line a drafter, beside plain decoding of the same run."""
    plain = {row["concurrency"]: row["tokens_per_s"] for row in rows if row["drafter"] == "none"}
    lines = []
    for drafter, drafts in dict.fromkeys((row["drafter"], row["drafts"]) for row in rows):
        mine = [row for row in rows if (row["drafter"], row["drafts"]) == (drafter, drafts)]
        mine.sort(key=lambda row: row["concurrency"])
        speeds = [f"{row['tokens_per_s']:,.0f}" for row in mine]
        name, lengths = drafter, "1"
        if drafter != "none":
            name = f"{drafter}, {drafts}"
            lengths = " / ".join(f"{row['mean_accept_length']:.2f}" for row in mine)
            ratios = [row["tokens_per_s"] / plain[row["concurrency"]] for row in mine]
            speeds = [f"{a} ({b:.2f}x)" for a, b in zip(speeds, ratios, strict=True)]
        times = " / ".join(f"{row['step_ms']:.2f}" for row in mine)
        lines.append(
            f"| {name}, {mine[0]['decode_steps']} | {' | '.join(speeds)} | {lengths} | {times} |"
        )
    return lines


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


def features() -> str:
    """What each sampling feature adds to a step, by device and drafter; a run for each device.

    On a CPU it is CPU time, which others on the machine change least.
    """
    runs = {
        (run["device"], row["drafter"]): [
            each for each in run["rows"] if each["drafter"] == row["drafter"]
        ]
        for run in _read("features")
        for row in run["rows"]
    }
    heads = " | ".join(f"{device}, {drafter}" for device, drafter in runs)
    lines = [f"| in a batch of 8 | {heads} |", "| --- " * (len(runs) + 1) + "|"]
    for place, row in enumerate(next(iter(runs.values()))):
        cells = []
        for (device, _), rows in runs.items():
            unit = "cpu_ms" if device == "cpu" else "step_ms"
            first, ms = rows[0][unit], rows[place][unit]
            digits = 1 if first > 10 else 2
            more = f"{ms - first:+.{digits}f} ms ({ms / first - 1:+.0%})"
            cells.append(f"{first:.{digits}f} ms a step" if place == 0 else more)
        lines.append(f"| {row['feature']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


TABLES: dict[str, Callable[[], str]] = {
    "served": served,
    "steps": steps,
    "sweep": sweep,
    "prompts": prompts,
    "programs": programs,
    "features": features,
}


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
