"""Draws `step_floor.png`: whole steps of a shape beside the least they could take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxspec.pictures.bars import floor_picture

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "roofline.json"


def main() -> None:
    """Reads the figures, the kept ones or those of a new run, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=KEPT, help="JSON of steps")
    parser.add_argument("--shape", help="of these sizes; unset: the first in the file")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    shape = args.shape or results["rows"][0]["shape"]
    rows = [
        row
        for row in results["rows"]
        if row["shape"] == shape and not row["step"].endswith("prefill")
    ]
    ordered = sorted(rows, key=lambda row: (row["step"] != "plain", row["batch"]))
    picture = floor_picture(ordered, f"{shape}, {results['device']}, {results['date']}")
    picture.save(args.out)


if __name__ == "__main__":
    main()
