"""`jaxspec train` and `jaxspec train data`. Host only until a command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.commands.common import add_compilation_cache
from jaxspec.options import Parser, add_options, given
from jaxspec.progress import ProgressDisplay
from jaxspec.training.config import (
    NOT_OF_EAGLE3,
    DataConfig,
    Eagle3TrainConfig,
    TrainConfig,
    TrainingError,
)


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command, and the command that makes the data."""
    add_options(parser, TrainConfig)
    add_compilation_cache(parser)
    subparsers = parser.add_subparsers(dest="train_command", metavar="data | eagle3")
    text = "make the data: the target answers its own prompts, or yours"
    data = subparsers.add_parser("data", help=text, description=text)
    add_options(data, DataConfig)
    add_compilation_cache(data)
    text = "train an EAGLE-3 head in place of a DFlash drafter"
    eagle3 = subparsers.add_parser("eagle3", help=text, description=text)
    add_options(eagle3, Eagle3TrainConfig, leave_out=NOT_OF_EAGLE3)
    add_compilation_cache(eagle3)


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Trains, or makes the data to train on; returns the exit status."""
    from jaxspec.compilation_cache import use_compilation_cache

    if args.compilation_cache:
        use_compilation_cache(cache_dir / "compiled")
    if args.train_command == "data":
        return _make_data(DataConfig(**given(args, DataConfig)), cache_dir)
    kind = Eagle3TrainConfig if args.train_command == "eagle3" else TrainConfig
    return _train(kind(**given(args, kind)), cache_dir)


def _make_data(config: DataConfig, cache_dir: Path) -> int:
    from jaxspec.training.data import make_data

    with ProgressDisplay() as progress:
        counts = make_data(config, cache_dir=cache_dir, on_progress=progress)
    print(
        f"{config.output}: {counts.conversations} conversations, {counts.tokens} tokens, "
        f"{counts.answer_tokens} of them in answers, {counts.seconds:.0f} s"
    )
    print(f"next: jaxspec train --data {config.output} --output DRAFTER --model {config.model}")
    return 0


def _train(config: TrainConfig, cache_dir: Path) -> int:
    try:
        from jaxspec.training.train import train
    except ModuleNotFoundError as error:
        raise TrainingError(
            f"training needs {error.name}, which is not installed; pip install -e '.[train]'"
        ) from None

    with ProgressDisplay() as progress:
        result = train(config, cache_dir=cache_dir, on_progress=progress)
    if result is None:
        return 0
    print(f"{result.folder}: best at step {result.steps}, {result.seconds / 60:.1f} minutes in all")
    if result.held_out is not None:
        length = result.held_out["simulated_accept_length"]
        print(f"held-out simulated accept length {length:.2f}")
    print(f'next: jaxspec generate "..." --model {config.model} --drafter {result.folder}')
    return 0
