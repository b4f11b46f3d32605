"""Draws `accept_lengths.png`: what the shipped drafter reaches, from `drafter_training.json`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from jaxspec.pictures.bars import accept_length_picture

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "drafter_training.json"


def main() -> None:
    """Reads the figures and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    histograms = {
        f"batch {row['batch']}": histogram_of(row["slots"])
        for row in results["served"]
        if "slots" in row
    }
    device = results["device"].partition(",")[0]
    title = f"smollm2-135m-dflash, held-out chat prompts, greedy; {device}, {results['date']}"
    accept_length_picture(histograms, title).save(args.out)


def histogram_of(slots: Sequence[float]) -> dict[int, float]:
    """Share of the steps at each accept length.

    slots: share of the steps whose first k drafts are right, k = 1... Example: (0.6, 0.2) are
    {1: 0.4, 2: 0.4, 3: 0.2}.
    """
    pairs = itertools.pairwise([1.0, *slots, 0.0])
    return {length: more - most for length, (more, most) in enumerate(pairs, start=1)}


if __name__ == "__main__":
    main()
