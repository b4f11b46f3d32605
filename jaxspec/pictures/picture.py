"""A picture that a notebook shows and a file keeps."""

from __future__ import annotations

import io
import platform
from dataclasses import dataclass
from pathlib import Path

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernels_pallas.dispatch import Device

_DPI = 110


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure without a window or a global list of figures behind it."""

    figure: Figure

    def save(self, path: Path | str) -> None:
        """Writes a .png or .svg file."""
        self.figure.savefig(path, dpi=_DPI)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=_DPI)
        return buffer.getvalue()


def blank(width: float, height: float, columns: int = 1) -> tuple[Picture, list[Axes]]:
    """An empty picture of so many inches, and its axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return Picture(figure), axes


def made_on() -> str:
    """Device and versions, for the title of a picture of something that was run here."""
    return f"{Device.current().kind}, jax {jax.__version__}, Python {platform.python_version()}"
