"""What an engine has done so far, in raw sums. Host only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

_VERIFIES_TO_JUDGE = 64  # slot-steps


@dataclass(slots=True)
class EngineStats:
    """Raw sums; ratios are made where they are printed."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0  # dispatches; a loop of several steps is one
    num_preemptions: int = 0
    num_verifies: int = 0  # slot-steps
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    host_s: float = 0.0  # planning, dispatching and committing
    wait_s: float = 0.0  # waiting for results
    accept_lengths: list[int] = field(default_factory=list)  # histogram, index = accept length

    def reset(self) -> None:
        """Sets all sums to zero."""
        fresh = EngineStats(accept_lengths=[0] * len(self.accept_lengths))
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def count_verifies(self, num_drafted: int, accepted: Sequence[int], num_committed: int) -> None:
        """Adds the verifies of a dispatch.

        num_drafted: of each. accepted: drafts accepted, an entry a verify. num_committed: tokens
        that all of them leave.
        """
        self.num_verifies += len(accepted)
        self.num_draft_tokens += num_drafted * len(accepted)
        self.num_accepted += sum(accepted)
        self.num_committed += num_committed
        for count in accepted:
            self.accept_lengths[count + 1] += 1


class DrafterCheck:
    """Warns once of drafts that are hardly ever right.

    A drafter made for another model, or misread, shows in nothing but its accept length.

    expected: the mean accept length below which something does not fit; None: anything may.
    """

    def __init__(self, expected: float | None):
        self._expected = expected

    def look_at(self, stats: EngineStats) -> None:
        """Warns where enough was drafted to judge; looks no more then."""
        if self._expected is None or stats.num_verifies < _VERIFIES_TO_JUDGE:
            return
        mean = 1.0 + stats.num_accepted / stats.num_verifies
        if mean < self._expected:
            log.warning(
                "mean accept length is %.2f after %d verify steps, below %.1f; check that the "
                "drafter was made for this model, or use --drafter none",
                mean,
                stats.num_verifies,
                self._expected,
            )
        self._expected = None
