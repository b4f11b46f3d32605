"""`jaxspec models`: what can be run by name. Host only."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxspec.options import Parser

_WIDEST = 10_000  # columns


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Prints the models with short names, and what else can be run."""
    from jaxspec.catalog import describe

    facts = describe(cache_dir)
    if args.json:
        print(json.dumps(facts))
        return 0
    table = Table("model", "from", "on this machine", box=None)
    for entry in facts["models"]:
        name = entry["name"] + (" (default)" if entry["default"] else "")
        table.add_row(name, entry["repo"], entry["cached"] or "-")
    # What is piped is read by programs, so it has the width that its words need.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDEST)
    console.print(table)
    console.print("Also: a folder, a .gguf file or a Hugging Face repo id of", highlight=False)
    console.print("  " + ", ".join(facts["architectures"]), highlight=False)
    console.print(
        f"Drafters: {', '.join(facts['drafters'])}, or a drafter's folder or repo id",
        highlight=False,
    )
    return 0
