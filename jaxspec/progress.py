"""Shows on stderr what takes its time: downloads, loading, compiling. Host only."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_QUIET_S = 2.0
_AGAIN_S = 15.0


class ProgressDisplay:
    """A `Progress` callback: a bar on a terminal, else a line now and then for what takes long.

    The bar is gone when the display closes, so that only results stay on the screen.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet_s: float = _QUIET_S,
        again_s: float = _AGAIN_S,
    ):
        """quiet_s, again_s: elsewhere than on a terminal, a stage is mentioned first and again."""
        self._console = console or Console(stderr=True)
        self._quiet_s, self._again_s = quiet_s, again_s
        self._what = ""
        self._started_s = 0.0
        self._told_s: float | None = None
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
            return
        now = time.monotonic()
        if self._told_s is None and now - self._started_s > self._quiet_s:
            self._say(f"{what} ...", now)
        elif self._told_s is not None and total and now - self._told_s > self._again_s:
            self._say(f"{what}: {done} of {total}", now)

    def _say(self, line: str, now: float) -> None:
        self._console.print(line, style="dim", highlight=False)
        self._told_s = now

    def _begin(self, what: str) -> None:
        self._what, self._started_s, self._told_s = what, time.monotonic(), None
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
