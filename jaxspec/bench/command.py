"""`jaxspec bench`: measures speed, acceptance and host work. Host only."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.bench.settings import (
    AcceptanceOptions,
    RooflineOptions,
    ServeMixOptions,
    Settings,
    ThroughputOptions,
)
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.shipped import shipped_checkpoint
from jaxspec.options import Parser, add_options, given, read_int
from jaxspec.progress import ProgressDisplay

if TYPE_CHECKING:
    from jaxspec.bench.report import Result


@dataclass(frozen=True, slots=True)
class Mode:
    """A bench: its file, what it shows, and its own defaults."""

    help: str
    engine: dict[str, Any]
    num_prompts: int = 8
    max_tokens: int = 64
    repeats: int = 5
    drafters: tuple[str, ...] = ("none", "ngram")
    shipped: bool = False  # measures the drafter that is shipped for the model, too

    def load(self, name: str) -> Callable[[Settings], Result]:
        """What runs it."""
        return importlib.import_module(f"jaxspec.bench.{name.replace('-', '_')}").run


_ALONE = {"max_num_seqs": 1, "max_model_len": 1024, "max_num_batched_tokens": 256}
_MANY = {**_ALONE, "max_num_seqs": 8}
MODES = {
    "compare": Mode(
        "plain decoding against drafters (the default)", _ALONE, repeats=3, shipped=True
    ),
    "latency": Mode("what one user alone waits for", _ALONE, shipped=True),
    "throughput": Mode(
        "tokens a second as more requests run at once", _MANY, num_prompts=16, shipped=True
    ),
    "adaptive": Mode(
        "verifying as many drafts as pay against always all and never any",
        _MANY,
        num_prompts=16,
        repeats=3,
        drafters=("ngram",),
        shipped=True,
    ),
    "acceptance": Mode(
        "how far drafts agree with the model",
        _MANY,
        num_prompts=16,
        drafters=("ngram",),
        shipped=True,
    ),
    "features": Mode(
        "what each sampling feature adds to a step",
        # Prompts go first, so that all steps are of one batch size: fewer programs to compile.
        {**_MANY, "enable_chunked_prefill": False},
        repeats=2,
        drafters=("none",),
        shipped=True,
    ),
    "host": Mode("what the host does in a step", _MANY, repeats=3),
    "forward": Mode("a step of the engine against the bare model", _ALONE),
    "prefill": Mode(
        "a prompt of 1,000 tokens against the arithmetic floor",
        {"max_num_seqs": 1, "max_model_len": 1024, "max_num_batched_tokens": 1024},
        drafters=("none",),
    ),
    "roofline": Mode(
        "a step against what the machine can do at best, with random weights of a named shape",
        {"max_num_seqs": 32, "max_model_len": 8192, "max_num_batched_tokens": 8192},
        max_tokens=256,
        repeats=3,
        drafters=("none", "dflash"),
    ),
    "serve-mix": Mode(
        "many requests at once: prefix cache, chunks of prompts, too few pages",
        {"max_num_seqs": 8, "max_model_len": 2048, "max_num_batched_tokens": 256},
        num_prompts=64,
        drafters=("none",),
    ),
    "startup": Mode("from the command to the first token", _ALONE, repeats=3, drafters=("none",)),
}


# What one mode alone is told.
OPTIONS: dict[str, type] = {
    "acceptance": AcceptanceOptions,
    "roofline": RooflineOptions,
    "serve-mix": ServeMixOptions,
    "throughput": ThroughputOptions,
}


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "mode",
        metavar="MODE",
        nargs="?",
        default="compare",
        choices=MODES,
        help="; ".join(f"{name}: {mode.help}" for name, mode in MODES.items()),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--num-prompts", "--limit", type=read_int, metavar="N", help="prompts to serve (of a set)"
    )
    parser.add_argument("--max-tokens", type=read_int, metavar="N", help="tokens of each answer")
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help="prompts, one a line or .jsonl, instead of the built-in ones (acceptance, adaptive "
        "and throughput); may be repeated",
    )
    parser.add_argument("--repeats", type=read_int, metavar="N", help="rounds of what is short")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="TEXT",
        help="a drafter to measure, with settings for it alone behind commas as in "
        "dflash,tree_nodes=32; may be repeated (default: those that need no checkpoint, and the "
        "one shipped for the model)",
    )
    for name, options in OPTIONS.items():
        add_options(parser.add_argument_group(name), options)
    engine = parser.add_argument_group("engine")
    add_options(engine, EngineConfig, leave_out=("drafter", "warm_up"))
    engine.add_argument(
        "--compilation-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep compiled programs for the next start (default: true)",
    )


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Runs a mode and prints its table or JSON; returns the exit status."""
    mode = MODES[args.mode]
    config = EngineConfig.from_kwargs(
        **{**mode.engine, **given(args, EngineConfig, leave_out=("drafter", "warm_up"))}
    )
    own = {name: options(**given(args, options)) for name, options in OPTIONS.items()}
    counts = {
        name: _count(name, getattr(args, name), getattr(mode, name))
        for name in ("num_prompts", "max_tokens", "repeats")
    }
    from jaxspec.bench.report import print_json, print_table
    from jaxspec.compilation_cache import use_compilation_cache

    if args.compilation_cache:
        use_compilation_cache(cache_dir / "compiled")
    with ProgressDisplay() as progress:
        settings = Settings(
            config=config,
            cache_dir=cache_dir,
            drafters=tuple(args.drafter or default_drafters(mode, config.model)),
            on_progress=progress,
            prompts=tuple(args.prompts),
            **counts,
            **{name.replace("-", "_"): options for name, options in own.items()},
        )
        for drafter in settings.drafters:
            settings.config_with(drafter)  # a mistake in the last one is not found hours later
        result = mode.load(args.mode)(settings)
    if args.json:
        described = {**asdict(config), **counts, "drafter": list(settings.drafters)}
        described["prompts"] = list(settings.prompts)
        if args.mode in own:
            described |= asdict(own[args.mode])
        print_json(args.mode, described, result)
    else:
        print_table(result)
    return 0


def default_drafters(mode: Mode, model: str) -> tuple[str, ...]:
    """Those that need no checkpoint, and the one that is shipped for the model."""
    shipped = mode.shipped and shipped_checkpoint("dflash", model) is not None
    return (*mode.drafters, "dflash") if shipped else mode.drafters


def _count(name: str, chosen: int | None, default: int) -> int:
    if chosen is not None and chosen < 1:
        raise ConfigError(f"{name} is {chosen}; it must be at least 1")
    return default if chosen is None else chosen
