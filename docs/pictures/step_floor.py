"""Draws `step_floor.png`: steps beside the least they could take, from `bench roofline --json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxspec.pictures.bars import floor_picture


def main() -> None:
    """Reads the figures and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what `jaxspec bench roofline --json` printed")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    shape, device = results["rows"][0]["shape"], results["device"]
    floor_picture(results["rows"], f"{shape}, {device}, {results['date']}").save(args.out)


if __name__ == "__main__":
    main()
