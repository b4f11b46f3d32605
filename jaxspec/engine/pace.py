"""How many drafts to verify in the next step: as measured, never more than pay. Host only."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from jaxspec.engine.draft_record import DraftRecord

_MEMORY = 128  # slot-steps that an accept rate remembers
_KEPT = 1 - 1 / _MEMORY  # of what it knows, a slot-step later
_AROUND = 8  # steps of the kept width that another width's step is held against
_ENOUGH = 3  # of them for a comparison
_SHARE = 0.15  # of a new comparison in a step time, once there were several
_OUTLIER = 3.0  # times what was expected; a pause of the machine is no step
_GAIN = 1.01  # what another width must promise before it is taken
# What drafts must promise over plain decoding. Rates flatter them: a step among plain ones begins
# anywhere, and so more often in a long stretch of right drafts than steps in a row would.
_OVER_PLAIN = 1.02
_PROBE_COST = 0.003  # share of the time that probes may waste
_LEAST_WASTE = 0.1  # of a probe, as a share of its time: an even match is known by guess alone
_PRIOR = 2.0  # slot-steps that a guess at an accept rate counts for at first
_FRESH_RUNS = 2  # of a program that was not compiled beforehand: they say nothing of its time
_DOUBT_AFTER = 32  # slot-steps
_DOUBT_BELOW = 2.0  # tokens a step: fewer may lose to plain decoding, whatever a step takes


class Pace:
    """Chooses the width of each verify step by tokens a second.

    A width's tokens a step follow from how often each draft was accepted when those before it were,
    and from how the drafts of the batch's requests fared beside others'. Its time is that of its
    program in this batch size as measured at warm-up, set right by comparisons: what else the
    machine does slows all widths, so a step is held against the steps of the width in use around
    it, and only the proportion is kept. Other widths are probed now and then, as often as a small
    share of the time pays for.

    The start: each draft is thought right as often as the one before it, and the first always,
    until steps show otherwise. Before any has, every other step is plain and the rest verify the
    fewest drafts there are to verify: so little is lost to learn that drafts do not pay, and where
    they do, no more than a step without them.

    A width without a measured time is never chosen, unless it may be tried: then plain decoding is,
    once drafts were wrong so often that it could be faster.

    widths: tokens that a step can verify, the widest first, 1 for plain decoding. depth: drafts
    that a step can accept at most. Batches are named by whatever tells their programs apart.
    """

    def __init__(self, widths: Sequence[int], depth: int):
        self.widths = tuple(widths)
        self._times: dict[tuple[Hashable, int], float] = {}
        self._num_compared: dict[tuple[Hashable, int], int] = {}
        self._around: dict[Hashable, tuple[int, deque[float]]] = {}  # width in use, its last steps
        self._trials: dict[tuple[Hashable, int], list[float]] = {}
        self._tried, self._accepted = [0.0] * depth, [0.0] * depth
        self._num_judged = 0
        self._num_blind = 0  # steps chosen while nothing was judged
        self._tokens = self._tokens_by_width()
        self._width = self.widths[0]
        self._saved = 0.0  # seconds that probes may waste
        self._last_probed = {width: 0 for width in self.widths}
        self._num_probes = 0

    def set_time(self, batch: Hashable, width: int, seconds: float) -> None:
        """Sets what a step of `width` takes, as measured before serving."""
        self._times[batch, width] = seconds

    def note_time(self, batch: Hashable, width: int, seconds: float) -> None:
        """Adds a step measured in service."""
        used, around = self._around.get(batch, (width, deque(maxlen=_AROUND)))
        if width != used and len(around) >= _ENOUGH:
            self._compare(batch, width, seconds, used, statistics.median(around))
        if width != used and width == self._width:
            used, around = width, deque(maxlen=_AROUND)
        if width == used:
            around.append(seconds)
            if (batch, width) not in self._times and len(around) > _FRESH_RUNS + _ENOUGH:
                self.set_time(batch, width, statistics.median(around))
        self._around[batch] = used, around

    def _compare(
        self, batch: Hashable, width: int, seconds: float, used: int, used_s: float
    ) -> None:
        """Sets a width's time right by a step of it among those of the width in use."""
        if (batch, used) not in self._times:
            return
        measured = self._times[batch, used] * seconds / used_s
        known = self._times.get((batch, width))
        if known is None:
            trials = self._trials.setdefault((batch, width), [])
            trials.append(measured)
            if len(trials) >= _FRESH_RUNS + _ENOUGH:
                self.set_time(batch, width, statistics.median(trials[_FRESH_RUNS:]))
            return
        count = self._num_compared[batch, width] = self._num_compared.get((batch, width), 1) + 1
        change = min(max(math.log(measured / known), -math.log(_OUTLIER)), math.log(_OUTLIER))
        self._times[batch, width] = known * math.exp(max(1 / count, _SHARE) * change)

    def note_accepted(self, width: int, judged: Sequence[tuple[DraftRecord, int]]) -> None:
        """Adds the drafts accepted in a step, of each row with the record of its request."""
        if width > 1 and judged:
            # Whoever is drafted for because its own drafts are right says less of the others.
            self._learn(width, [(min(1.0, 1 / record.factor), count) for record, count in judged])
        expected = self.tokens_a_step(width) - 1
        for record, count in judged:
            record.note(count, expected)

    def _learn(self, width: int, judged: Sequence[tuple[float, int]]) -> None:
        """Adds drafts accepted to what is known of all requests, each row with its weight."""
        self._num_judged += len(judged)
        drafted = min(width - 1, len(self._tried))
        stopped = [0.0] * (drafted + 1)  # rows by how many of these drafts were accepted
        for weight, count in judged:
            stopped[min(count, drafted)] += weight
        num_tried = sum(stopped)
        for draft in range(drafted):
            if not num_tried:
                break
            num_right = sum(stopped[draft + 1 :])
            kept = _KEPT**num_tried
            self._tried[draft] += (1.0 - kept) * (_MEMORY - self._tried[draft])
            rate = num_right / num_tried
            self._accepted[draft] += (1.0 - kept) * (rate * _MEMORY - self._accepted[draft])
            num_tried = num_right
        self._tokens = self._tokens_by_width()

    def tokens_a_step(self, width: int) -> float:
        """Tokens that a row of a step of `width` emits of a usual request."""
        return self._tokens[min(width, len(self._tokens)) - 1]

    def _tokens_by_width(self) -> list[float]:
        """`tokens_a_step` of the widths from 1 on."""
        reached, rate, tokens = 1.0, 1.0, [1.0]
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            guessed = _PRIOR * (1 - tried / _MEMORY)  # a guess fades as steps do
            rate = (accepted + guessed * rate) / (tried + guessed)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens

    def choose(
        self, batch: Hashable, records: Sequence[DraftRecord] = (), *, may_try: bool = False
    ) -> int:
        """The width of the next step of a batch.

        records: of its requests. may_try: programs may be compiled for widths that were not
        measured.
        """
        full = self.widths[0]
        known = [width for width in self.widths if (batch, width) in self._times]
        if full not in known:
            return full
        if len(known) == 1:
            return 1 if may_try and self._is_doubtful() else full
        if not self._num_judged and 1 in known:
            self._num_blind += 1
            return known[-2] if self._num_blind % 2 else 1
        factor = sum(record.factor for record in records) / len(records) if records else 1.0
        speeds = {
            width: self._tokens_with(factor, width) / self._times[batch, width] for width in known
        }
        if 1 in speeds:
            speeds[1] *= _OVER_PLAIN
        best = max(speeds, key=speeds.__getitem__)
        kept = self._width if self._width in known else full
        self._width = best if speeds[best] > _GAIN * speeds[kept] else kept
        return self._probe(batch, speeds) or self._width

    def _tokens_with(self, factor: float, width: int) -> float:
        """Tokens a step where `factor` times the usual number of drafts is accepted."""
        return 1 + min(width - 1, factor * (self.tokens_a_step(width) - 1))

    def _is_doubtful(self) -> bool:
        full = self.widths[0]
        return self._num_judged >= _DOUBT_AFTER and self.tokens_a_step(full) < _DOUBT_BELOW

    def _probe(self, batch: Hashable, speeds: Mapping[int, float]) -> int | None:
        """Another width, where enough was saved for what its step is thought to waste."""
        self._saved += _PROBE_COST * self._times[batch, self._width]
        others = [width for width in speeds if width != self._width]
        width = min(others, key=self._last_probed.__getitem__)
        waste = 1 - speeds[width] / speeds[self._width]
        cost = self._times[batch, width] * max(waste, _LEAST_WASTE)
        if self._saved < cost:
            return None
        self._saved = 0.0
        self._num_probes += 1
        self._last_probed[width] = self._num_probes
        return width
