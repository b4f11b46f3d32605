"""The `jaxspec` command. The only file that reads environment variables."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxspec import __version__
from jaxspec.bench import command as bench
from jaxspec.commands import chat, generate, models
from jaxspec.commands.common import EXIT_FAILED, OutputLost, write
from jaxspec.config import ConfigError
from jaxspec.interrupts import (
    EXIT_TERMINATED,
    end_at_sigterm,
    end_while_compiling,
    resend_lost_interrupts,
)
from jaxspec.options import Parser, UsageError, parse
from jaxspec.request import RequestError
from jaxspec.training import command as train

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # as of a process that SIGPIPE has ended


@dataclass(frozen=True, slots=True)
class Command:
    """A word behind `jaxspec`: what it does, its options, and what runs it."""

    help: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, Path], int]


COMMANDS = {
    "generate": Command("answer one prompt", generate.add_arguments, generate.run),
    "chat": Command("talk with a model", chat.add_arguments, chat.run),
    "models": Command("list what can be run by name", models.add_arguments, models.run),
    "train": Command("make a drafter for a model, and data for it", train.add_arguments, train.run),
    "bench": Command("measure speed, acceptance and host work", bench.add_arguments, bench.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status.

    A user's mistake is one sentence on stderr and status 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    resend_lost_interrupts()
    end_at_sigterm()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            write("")
        return status
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        if argv is None:  # nobody called this process but to run the command
            end_while_compiling(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        if leaving.code == EXIT_TERMINATED:
            print("jaxspec: terminated", file=sys.stderr)
            if argv is None:
                end_while_compiling(EXIT_TERMINATED)
        raise
    except BrokenPipeError:
        # Whatever is still buffered goes nowhere, instead of failing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except OutputLost as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if not is_users_mistake(error):
            raise
        print(f"jaxspec: {str(error).removesuffix('.')}", file=sys.stderr)
        return EXIT_MISTAKE


def is_users_mistake(error: Exception) -> bool:
    """Whether the message of an error says all that there is to say."""
    if isinstance(error, (UsageError, ConfigError, RequestError)):
        return True
    from jaxspec.weights.files import ModelFileError
    from kernels_pallas.dispatch import UnsupportedKernel

    return isinstance(error, (ModelFileError, UnsupportedKernel))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="jaxspec", description="Lossless speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxspec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(parsers[name])
    args = parse(parser, parsers, argv)
    if args.command is None:
        parser.print_help()
        return 0
    return COMMANDS[args.command].run(args, _cache_dir())


def _cache_dir() -> Path:
    """Where models and compiled programs are kept: JAXSPEC_CACHE, else ~/.cache/jaxspec."""
    chosen = os.environ.get("JAXSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "jaxspec"
