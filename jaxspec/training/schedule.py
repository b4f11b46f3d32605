"""How long a run goes on and how fast it learns. Host only."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARM_STEPS = 12  # until a step's time is known; the first ones compile
_PROVISIONAL_STEPS = 2500  # before that
_SLACK = 0.95  # of the time left: the rest goes to measuring and saving


def learning_rate_at(step: int, total_steps: int, *, peak: float, warmup: float) -> float:
    """Rises linearly over the first `warmup` of the steps, then falls to 0 along a cosine.

    step: steps done before this one, from 0.
    """
    rising = max(1, round(total_steps * warmup))
    if step < rising:
        return peak * (step + 1) / rising
    share = (step - rising) / max(1, total_steps - rising)
    return peak * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


@dataclass(slots=True)
class Horizon:
    """The number of steps of a run: given, or fitted to the wall time once a step's is known.

    Once it is fitted it stays, also in a resumed run, so that the schedule is one curve.
    """

    total_steps: int | None
    max_seconds: float | None = None

    @property
    def steps(self) -> int:
        """Steps of the run, as far as is known."""
        return self.total_steps if self.total_steps is not None else _PROVISIONAL_STEPS

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is still to be fitted."""
        return self.total_steps is None

    def fit(self, *, done: int, elapsed_s: float, seconds_a_step: float) -> None:
        """Decides the number of steps from the time that is left."""
        assert self.max_seconds is not None
        left = max(0.0, self.max_seconds - elapsed_s) * _SLACK
        self.total_steps = done + max(1, int(left / max(seconds_a_step, 1e-6)))

    def is_over(self, *, done: int, elapsed_s: float) -> bool:
        """Whether the run ends here."""
        if self.total_steps is not None and done >= self.total_steps:
            return True
        return self.max_seconds is not None and elapsed_s >= self.max_seconds
