"""How a bench shows its rows: a table for people, one JSON object for machines."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxspec import __version__
from kernels_pallas.dispatch import Device

_FILE_WIDTH = 160  # a file or pipe has no width of its own, and a cut table says nothing


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: the key of the rows, its header, and how a value is written."""

    key: str
    header: str
    write: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Result:
    """What a mode measured.

    rows: one dictionary a line of the table, raw sums included. notes: what holds for all rows.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    notes: Mapping[str, Any] = field(default_factory=dict)


def number(digits: int) -> Callable[[float | None], str]:
    """Writes a number with so many digits behind the point, "-" where there is none."""
    return lambda value: "-" if value is None else f"{value:.{digits}f}"


def bars(counts: Mapping[int, int]) -> str:
    """A histogram in a line: accept length, share in percent."""
    total = sum(counts.values())
    return " ".join(f"{key}:{round(100 * count / total)}%" for key, count in counts.items())


def shares(values: Sequence[float | None]) -> str:
    """Shares in a line, in percent."""
    return " ".join("-" if value is None else f"{value:.0%}" for value in values)


def facts() -> dict[str, Any]:
    """The command, machine and versions that figures hold for."""
    return {
        "command": "jaxspec " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": Device.current().kind,
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": {
            "jaxspec": __version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
        },
    }


def print_table(result: Result) -> None:
    """Prints the table and its notes to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    table = Table(title=result.title, box=None, title_justify="left")
    for index, column in enumerate(result.columns):
        table.add_column(column.header, no_wrap=True, justify="right" if index else "left")
    for row in result.rows:
        table.add_row(*(column.write(row[column.key]) for column in result.columns))
    console.print(table)
    for name, value in result.notes.items():
        console.print(f"{name}: {value}")


def print_json(mode: str, settings: Mapping[str, Any], result: Result) -> None:
    """Prints everything as one JSON object to stdout."""
    print(
        json.dumps(
            {
                **facts(),
                "mode": mode,
                "settings": settings,
                "rows": list(result.rows),
                "notes": result.notes,
            }
        )
    )
