"""The picture of `jaxspec bench acceptance --plot`: how many drafts are right, slot by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError


def draw_acceptance(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws a line a row: the share of verify steps whose first k drafts are right, over k.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "plot needs matplotlib, which is not installed; pip install -e '.[train]'"
        ) from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["mean_accept_length"] is None:
            continue
        label = (
            f"{row['drafter']}, {row['prompts']}, T = {row['temperature']:g}: "
            f"{row['mean_accept_length']:.2f} tokens a step"
        )
        slots = range(1, len(row["slots"]) + 1)
        axes.plot(slots, [100 * share for share in row["slots"]], marker="o", label=label)
    axes.set(xlabel="drafts", ylabel="verify steps with all of them right, %", ylim=(0, 100))
    if axes.lines:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plot is {str(file)!r}, which cannot be written ({error}); name a .png or .svg file "
            "in a folder that exists"
        ) from None
