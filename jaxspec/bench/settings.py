"""What a mode is told: which model, which drafters, how much work. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError, EngineConfig, check_names
from jaxspec.options import read_settings
from jaxspec.weights.files import Progress

MIX_NAMES = ("common prefix", "long prompts", "long answers", "overload")
SHAPE_NAMES = ("qwen3-8b", "smollm2-135m", "tiny")  # of `shapes.SHAPES`, which imports jax


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """What `jaxspec bench roofline` alone is told."""

    shape: str = _option("smollm2-135m", f"sizes of random weights: {', '.join(SHAPE_NAMES)}")
    batch: tuple[int, ...] = _option((1, 8, 32), "requests that decode together")
    context: tuple[int, ...] = _option((1024,), "tokens of each prompt")
    split: bool = _option(False, "verification and ingest as two programs")

    def __post_init__(self) -> None:
        if self.shape not in SHAPE_NAMES:
            raise ConfigError(
                f"shape is {self.shape!r}; it must be one of {', '.join(SHAPE_NAMES)}"
            )
        for name, least in (("batch", min(self.batch)), ("context", min(self.context))):
            if least < 1:
                raise ConfigError(f"{name} is {least}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOptions:
    """What `jaxspec bench acceptance` alone is told."""

    temperature: tuple[float, ...] = _option((0.0,), "of the answers; 0 takes the likeliest token")
    plot: str | None = _option(None, "file for a picture of how many drafts are right")

    def __post_init__(self) -> None:
        if not 0.0 <= min(self.temperature) <= max(self.temperature) < float("inf"):
            raise ConfigError(f"temperature is {min(self.temperature)}; it must be 0 or above")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeMixOptions:
    """What `jaxspec bench serve-mix` alone is told."""

    prefix: int = _option(1000, "tokens that the prompts have in common, or long prompts for them")
    mix: tuple[str, ...] = _option(MIX_NAMES, "which mixes")

    def __post_init__(self) -> None:
        if self.prefix < 1:
            raise ConfigError(f"prefix is {self.prefix}; it must be at least 1")
        check_names("mix", self.mix, list(MIX_NAMES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """What `jaxspec bench throughput` alone is told."""

    concurrency: tuple[int, ...] = _option(
        (), "requests that run at once; unset: 1, 2, 4, ... up to max_num_seqs"
    )

    def __post_init__(self) -> None:
        if self.concurrency and min(self.concurrency) < 1:
            raise ConfigError(f"concurrency is {min(self.concurrency)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a bench.

    config: of every engine, whatever its drafter. drafters: in the order of the table.
    repeats: how often what is short is measured again. prompts: files of them; none: built-in.
    """

    config: EngineConfig
    cache_dir: Path
    drafters: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    repeats: int
    on_progress: Progress
    prompts: tuple[str, ...] = ()
    roofline: RooflineOptions = field(default_factory=RooflineOptions)
    acceptance: AcceptanceOptions = field(default_factory=AcceptanceOptions)
    serve_mix: ServeMixOptions = field(default_factory=ServeMixOptions)
    throughput: ThroughputOptions = field(default_factory=ThroughputOptions)

    def config_with(self, drafter: str) -> EngineConfig:
        """The engine's settings with a drafter, and settings for it alone behind commas.

        Example: `dflash,tree_nodes=32` drafts trees, whatever the other drafters do.
        """
        name, *words = drafter.split(",")
        return replace(self.config, drafter=name, **read_settings(EngineConfig, words))
