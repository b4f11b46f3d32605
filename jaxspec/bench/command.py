"""`jaxspec bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.options import Parser


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command."""


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Runs."""
    return 0
