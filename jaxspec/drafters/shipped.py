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


SHIPPED = {"smollm2-135m": Shipped("smollm2-135m-dflash", 2.72)}


def shipped_drafter(model: str) -> Shipped | None:
    """The drafter made for a model, by any of the names that users call it."""
    return SHIPPED.get(model.lower())


def shipped_checkpoint(name: str, model: str) -> Path | None:
    """The folder that a drafter setting names: by its own name, or "dflash" for the model's."""
    for shipped in SHIPPED.values():
        if name == shipped.folder:
            return shipped.path
    shipped = shipped_drafter(model)
    return shipped.path if shipped is not None and name == "dflash" else None
