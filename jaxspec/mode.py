"""How much a batch asks of its programs beside the target's pass. Host only, no jax."""

from __future__ import annotations

import enum


class Mode(enum.IntEnum):
    """A family of programs; each does all that the ones before it do, and costs more.

    A batch runs the highest mode among its rows, so that what no row of it asks for costs nothing.
    """

    GREEDY = 0  # takes the highest logit
    SAMPLED = 1  # temperature, filters and noise
    EDITED = 2  # penalties, logit bias, min_tokens and bad words change the logits first
    LOGPROBS = 3  # tells the log-probabilities of what was chosen, and of what else was likely
    CONSTRAINED = 4  # a grammar allows some tokens alone, as the host works out meanwhile
    PROMPT_LOGPROBS = 5  # of prefills alone: those of the prompt, too

    @property
    def edits(self) -> bool:
        """True where the programs read and write `EngineState.edits`."""
        return self >= Mode.EDITED

    @property
    def logprobs(self) -> bool:
        """True where a step's output holds log-probabilities of the chosen tokens."""
        return self >= Mode.LOGPROBS

    @property
    def constrained(self) -> bool:
        """True where a program takes the tokens that grammars allow."""
        return self >= Mode.CONSTRAINED
