"""How many drafts to verify in the next step: as measured, never more than pay. Host only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_MEMORY = 64  # slot-steps that an accept rate remembers
_TIME_SHARE = 0.1  # of a new measurement in a step time
_OUTLIER = 3.0  # times the known step time; a pause of the machine is no step
_GAIN = 1.02  # what another width must promise before it is taken
_PROBE_COST = 0.01  # share of the time that probes may waste


class Pace:
    """Chooses the width of each verify step by tokens a second.

    A width's tokens a step follow from how often each draft was accepted when those before it were;
    its time is that of its program in this batch size, measured at warm-up and in service. A width
    without a measured time is never chosen. When fewer drafts are verified, the rates of the others
    go stale: a full step is taken now and then, and another at once where it paid.

    widths: tokens that a step can verify, the widest first, 1 for plain decoding. depth: drafts
    that a step can accept at most. Batches are named by whatever tells their programs apart.
    """

    def __init__(self, widths: Sequence[int], depth: int):
        self.widths = tuple(widths)
        self._times: dict[tuple[Hashable, int], float] = {}
        # A draft is thought right until it was wrong.
        self._tried, self._accepted = [1.0] * depth, [1.0] * depth
        self._width = self.widths[0]
        self._since_probe = 0
        self._probe_again = False

    def set_time(self, batch: Hashable, width: int, seconds: float) -> None:
        """Sets what a step of `width` takes, as measured before serving."""
        self._times[batch, width] = seconds

    def note_time(self, batch: Hashable, width: int, seconds: float) -> None:
        """Adds a step measured in service."""
        known = self._times.get((batch, width))
        if known is None or seconds > _OUTLIER * known:
            return
        self._times[batch, width] = known + _TIME_SHARE * (seconds - known)

    def note_accepted(self, batch: Hashable, width: int, num_accepted: Sequence[int]) -> None:
        """Adds the drafts accepted in a step, one number a row."""
        if width == 1 or not num_accepted:
            return
        for count in num_accepted:
            for draft in range(min(count + 1, width - 1, len(self._tried))):
                right = 1.0 if draft < count else 0.0
                self._tried[draft] += 1 - self._tried[draft] / _MEMORY
                self._accepted[draft] += right - self._accepted[draft] / _MEMORY
        if width == self.widths[0] > self._width and (batch, width) in self._times:
            tokens = 1 + sum(num_accepted) / len(num_accepted)
            speed = tokens / self._times[batch, width]
            self._probe_again = speed > self._speed(batch, self._width)

    def tokens_a_step(self, width: int) -> float:
        """Tokens that a row of a step of `width` is expected to emit."""
        tokens, reached = 1.0, 1.0
        for tried, accepted in zip(self._tried[: width - 1], self._accepted, strict=False):
            reached *= accepted / tried
            tokens += reached
        return tokens

    def choose(self, batch: Hashable) -> int:
        """The width of the next step of a batch."""
        full = self.widths[0]
        known = [width for width in self.widths if (batch, width) in self._times]
        if full not in known or len(known) == 1:
            return full
        best = max(known, key=lambda width: self._speed(batch, width))
        kept = self._width if self._width in known else full
        pays = self._speed(batch, best) > _GAIN * self._speed(batch, kept)
        self._width = best if pays else kept
        if self._width == full or self._probe_again:
            self._probe_again = False
            return full
        self._since_probe += 1
        slower = self._times[batch, full] / self._times[batch, self._width] - 1
        if self._since_probe <= max(slower, 0.0) / _PROBE_COST:
            return self._width
        self._since_probe = 0
        return full

    def _speed(self, batch: Hashable, width: int) -> float:
        return self.tokens_a_step(width) / self._times[batch, width]
