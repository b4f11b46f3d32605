"""What a mode is told: which model, which drafters, how much work. Host only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from jaxspec.config import EngineConfig
from jaxspec.weights.files import Progress


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a bench.

    config: of every engine, whatever its drafter. drafters: in the order of the table.
    repeats: how often what is short is measured again.
    """

    config: EngineConfig
    cache_dir: Path
    drafters: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    repeats: int
    on_progress: Progress

    def config_with(self, drafter: str) -> EngineConfig:
        """The engine's settings with this drafter."""
        return replace(self.config, drafter=drafter)
