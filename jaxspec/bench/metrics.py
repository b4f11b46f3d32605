"""Raw sums of a run; ratios are made where they are printed. Host only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxspec.request import RequestOutput


class Counts(Protocol):
    """What `EngineStats`, `RequestMetrics` and `Sums` have in common."""

    num_verifies: int
    num_draft_tokens: int
    num_accepted: int
    num_committed: int


@dataclass(slots=True)
class Sums:
    """Raw counts of verification.

    num_verifies: slot-steps, one per live request per decode step. num_draft_tokens: K of each.
    num_accepted: drafts that the target agreed with. num_committed: tokens appended, after stop
    ids and limits.
    """

    num_verifies: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_committed: int = 0

    @classmethod
    def of(cls, counts: Counts) -> Sums:
        """A copy that no later step changes."""
        return cls(*(getattr(counts, name) for name in cls.__slots__))

    def plus(self, other: Counts) -> Sums:
        """The sums of both."""
        names = self.__slots__
        return Sums(*(getattr(self, name) + getattr(other, name) for name in names))


def mean_accept_length(counts: Counts) -> float | None:
    """Tokens a verify, bonus included: 1 + accepted / verifies; None before the first verify."""
    if not counts.num_verifies:
        return None
    return 1.0 + counts.num_accepted / counts.num_verifies


def acceptance_rate(counts: Counts) -> float | None:
    """Share of the drafts that were accepted; None where nothing was drafted."""
    if not counts.num_draft_tokens:
        return None
    return counts.num_accepted / counts.num_draft_tokens


def histogram(accept_lengths: list[int]) -> dict[int, int]:
    """How often each accept length came, from a list of them."""
    return {length: accept_lengths.count(length) for length in sorted(set(accept_lengths))}


def acceptance_by_position(
    accept_lengths: Mapping[int, int], num_draft_tokens: int
) -> tuple[float | None, ...]:
    """Share of the drafts at each position that were accepted once those before them were.

    A drafter whose steps all use one layer, or one hidden state, shows here: its first position is
    as trained and the others are not.

    accept_lengths: how often each accept length came. num_draft_tokens: K.
    Returns K shares; None where no draft got that far. Example: lengths 1, 3, 3 of K = 2: (2/3, 1).
    """
    reached = [
        sum(count for length, count in accept_lengths.items() if length > position)
        for position in range(num_draft_tokens + 1)
    ]
    pairs = itertools.pairwise(reached)
    return tuple(after / before if before else None for before, after in pairs)


def decode_tokens_per_s(output: RequestOutput) -> float | None:
    """Tokens a second after the first one; None where there is no second."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    if count < 2 or metrics.first_token_s is None or metrics.finished_s is None:
        return None
    elapsed = metrics.finished_s - metrics.first_token_s
    return (count - 1) / elapsed if elapsed > 0 else None


def request_figures(output: RequestOutput) -> dict[str, Any]:
    """The counts, times and ratios of one finished request."""
    metrics = output.metrics
    duration = None if metrics.finished_s is None else metrics.finished_s - metrics.arrival_s
    return {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_tokens": len(output.outputs[0].token_ids),
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "duration_s": duration,
        "tokens_per_s": decode_tokens_per_s(output),
        "num_verifies": metrics.num_verifies,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted": metrics.num_accepted,
        "num_committed": metrics.num_committed,
        "mean_accept_length": metrics.mean_accept_length,
        "accept_lengths": histogram(metrics.accept_lengths),
    }


def figures_line(output: RequestOutput, *, drafter: str, kernels: dict[str, str]) -> str:
    """One line about a finished request, for people."""
    metrics = output.metrics
    parts = [f"{len(output.outputs[0].token_ids)} tokens"]
    rate = decode_tokens_per_s(output)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if metrics.time_to_first_token_s is not None:
        parts.append(f"first token {metrics.time_to_first_token_s:.2f} s")
    if metrics.mean_accept_length is not None:
        parts.append(f"mean accept length {metrics.mean_accept_length:.2f}")
    parts += [f"drafter {drafter}", f"kernels {kernels_text(kernels)}"]
    return ", ".join(parts)


def kernels_text(kernels: dict[str, str]) -> str:
    """The implementations of the ops, in a word where they are all the same."""
    names = set(kernels.values())
    if len(names) == 1:
        return names.pop()
    return " ".join(f"{op}={name}" for op, name in kernels.items())
