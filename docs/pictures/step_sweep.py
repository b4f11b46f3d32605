"""Draws `step_sweep.png`: whole steps against the least they could take, by context and batch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxspec.pictures.bars import sweep_picture

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "roofline_sweep.json"


def main() -> None:
    """Reads the figures, the kept ones or those of a new run, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=KEPT, help="JSON of steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    rows = [row for row in results["rows"] if not row["step"].endswith("prefill")]
    sweep_picture(rows, f"{rows[0]['shape']}, {results['device']}").save(args.out)


if __name__ == "__main__":
    main()
