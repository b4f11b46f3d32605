"""Drafters that come with the package. Host only."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import NamedTuple


class Shipped(NamedTuple):
    """A drafter's folder under `drafters/checkpoints/`, and how well it guesses.

    accept_length: mean, greedy, on held-out chat prompts; see the card in the folder.
    """

    folder: str
    accept_length: float

    @property
    def path(self) -> Path:
        """Where its checkpoint lies."""
        return Path(str(resources.files("jaxspec.drafters"))) / "checkpoints" / self.folder


SHIPPED: dict[str, Shipped] = {}


def shipped_drafter(model: str) -> Shipped | None:
    """The drafter made for a model, by any of the names that users call it."""
    return SHIPPED.get(model.lower())
