"""Draws `attention_bandwidth.png`: attention against a plain copy, from its bench's JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxspec.pictures.bars import kernel_picture

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_paged_attention.json"


def main() -> None:
    """Reads the figures and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    title = (
        f"paged_attention, 32 query and 8 KV heads of 128, bfloat16; {results['device']}, "
        f"jax {results['versions']['jax']}, {results['date']}"
    )
    kernel_picture(results["rows"], title).save(args.out)


if __name__ == "__main__":
    main()
