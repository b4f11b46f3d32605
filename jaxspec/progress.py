"""Shows on stderr what takes its time: downloads, loading, compiling. Host only."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_QUIET_S = 2.0


class ProgressDisplay:
    """A `Progress` callback: a bar on a terminal, else one line for each stage that takes long.

    The bar is gone when the display closes, so that only results stay on the screen.
    """

    def __init__(self, console: Console | None = None, *, quiet_s: float = _QUIET_S):
        """quiet_s: elsewhere than on a terminal, what is over by then is not mentioned."""
        self._console = console or Console(stderr=True)
        self._quiet_s = quiet_s
        self._what = ""
        self._started_s = 0.0
        self._announced = False
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Takes note of where a stage is; total 0: nobody knows."""
        if what != self._what:
            self._begin(what)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or None)
        elif not self._announced and time.monotonic() - self._started_s > self._quiet_s:
            self._console.print(f"{what} ...", style="dim", highlight=False)
            self._announced = True

    def _begin(self, what: str) -> None:
        self._what, self._started_s, self._announced = what, time.monotonic(), False
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(what, total=None)

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
