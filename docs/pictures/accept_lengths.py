"""Draws `accept_lengths.png`: what the shipped drafter reaches, from `acceptance.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxspec.pictures.bars import accept_length_picture

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "acceptance.json"


def main() -> None:
    """Reads the figures and draws those of the drafter, greedy, a set of prompts each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--drafter", default="dflash")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    histograms = {
        row["prompts"]: {int(length): count for length, count in row["accept_lengths"].items()}
        for row in results["rows"]
        if row["drafter"] == args.drafter and row["temperature"] == 0 and row["num_prompts"]
    }
    title = f"{args.drafter}, greedy, loops left out; {results['device']}, {results['date']}"
    accept_length_picture(histograms, title).save(args.out)


if __name__ == "__main__":
    main()
