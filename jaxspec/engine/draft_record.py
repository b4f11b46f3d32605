"""How a request's drafts have fared lately, beside what was expected of them. Host only."""

from __future__ import annotations

_USUAL = 3.0  # accepted drafts: as much does the expected weigh against a record
_KEPT = 0.95  # of a record, a step later


class DraftRecord:
    """What a request's own drafts say of its next ones.

    An answer that copies its prompt is guessed right for long stretches, others hardly ever.
    """

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    @property
    def factor(self) -> float:
        """Drafts accepted of this request where one is expected."""
        return (self._accepted + _USUAL) / (self._expected + _USUAL)

    def note(self, accepted: int, expected: float) -> None:
        """Adds a step; by one without drafts the record only fades."""
        self._accepted = self._accepted * _KEPT + accepted
        self._expected = self._expected * _KEPT + expected
