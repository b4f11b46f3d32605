"""Shows how a run goes: a line on the terminal, a metrics file, and a plot. Host only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec.training.config import TrainingError

_LINE_S = 10.0  # between lines where there is no terminal
Metrics = dict[str, Any]


def ratios(sums: Any) -> Metrics:
    """What the raw sums of blocks (`loss.SlotSums`) mean.

    Slot accuracies are of the slots that have a label; the simulated accept length is the mean
    over the blocks, wherever they begin; see `walk` for what serving makes of it.
    """
    seen = np.maximum(np.asarray(sums.seen), 1.0)
    blocks = max(float(sums.blocks), 1.0)
    return {
        "loss": float(sums.loss) / max(float(sums.norm), 1.0),
        "slot_accuracy": [round(float(x), 4) for x in np.asarray(sums.correct) / seen],
        "simulated_accept_length": float(sums.accept_length) / blocks,
    }


class Report:
    """The metrics file and what is on the screen while a run goes on."""

    def __init__(self, path: Path, *, console: Console | None = None):
        """path: metrics.jsonl; a run that goes on appends to it."""
        self._path = path
        self._console = console or Console(stderr=True)
        self._last_line_s = 0.0
        self._file: IO[str] | None = None
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def add(self, kind: str, step: int, metrics: Metrics, *, total: int | None) -> None:
        """Records metrics of a step, kind "train" or "held-out", and shows them.

        Raises:
            TrainingError: the file cannot be written.
        """
        self._write({"kind": kind, "step": step, **metrics})
        text = describe(metrics)
        if self._bar is not None:
            if kind == "train":
                self._bar.update(self._task, completed=step, total=total, description=text)
            else:
                self._bar.print(f"step {step} {kind}: {text}")
        elif kind != "train" or time.monotonic() - self._last_line_s > _LINE_S:
            self._last_line_s = time.monotonic()
            of = "" if total is None else f"/{total}"
            self._console.print(f"step {step}{of} {kind}: {text}", highlight=False)

    def say(self, text: str) -> None:
        """Shows a line."""
        (self._bar.console if self._bar is not None else self._console).print(text, highlight=False)

    def _write(self, entry: Metrics) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "a")  # noqa: SIM115 (open for as long as the run)
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._path} could not be written ({error.strerror}); free some space and run "
                "again with --resume"
            ) from None

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()


def describe(metrics: Metrics) -> str:
    """Metrics in a line."""
    slots = " ".join(f"{100 * x:.0f}" for x in metrics["slot_accuracy"])
    text = (
        f"loss {metrics['loss']:.3f}, accept length {metrics['simulated_accept_length']:.2f}, "
        f"slots {slots} %"
    )
    rate = metrics.get("steps_per_s")
    return text if rate is None else f"{text}, {rate:.1f} steps/s"


def read_metrics(path: Path) -> list[Metrics]:
    """The entries of a metrics file; one that was cut off is left out."""
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def trim_metrics(path: Path, last_step: int) -> None:
    """Drops what a run recorded after its last checkpoint, since it will run again."""
    if path.exists():
        kept = [entry for entry in read_metrics(path) if entry["step"] <= last_step]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))


def plot_metrics(entries: list[Metrics], path: Path) -> None:
    """Draws loss, simulated accept length and slot accuracies over the steps."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    panels: list[tuple[str, Callable[[Metrics], Any]]] = [
        ("loss", lambda entry: entry["loss"]),
        ("simulated accept length", lambda entry: entry["simulated_accept_length"]),
        ("slot accuracy, held out", lambda entry: entry["slot_accuracy"]),
    ]
    for axis, (title, value) in zip(axes, panels, strict=True):
        for kind in ("train", "held-out"):
            some = [entry for entry in entries if entry["kind"] == kind]
            if not some or (kind == "train" and "slot" in title):
                continue
            lines = axis.plot([entry["step"] for entry in some], [value(e) for e in some])
            names = [kind] if len(lines) == 1 else [f"slot {k + 1}" for k in range(len(lines))]
            for line, name in zip(lines, names, strict=True):
                line.set_label(name)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
