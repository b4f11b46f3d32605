"""What the commands that prompt a model share: options, checks and figures. Host only."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.table import Table

from jaxspec.bench.metrics import figures_line
from jaxspec.config import EngineConfig
from jaxspec.options import Parser, add_options, given
from jaxspec.request import RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.tokenizer import Tokenizer

EXIT_FAILED = 1  # the command was right, and its answer is lost or broken

_ENGINE = {"max_num_seqs": 1}


def add_prompting(parser: Parser) -> None:
    """Adds what goes into the chat template beside the prompt."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="let models that can think before they answer do so, or not",
    )


def add_engine_and_sampling(parser: Parser, sampling_defaults: dict[str, Any]) -> None:
    """Adds the options of `SamplingParams` and `EngineConfig`."""
    sampling = parser.add_argument_group("sampling")
    add_options(sampling, SamplingParams, defaults=sampling_defaults)
    engine = parser.add_argument_group("engine")
    # There is one request at a time here, and its seed is among the sampling options.
    # And what it needs is compiled when it is asked.
    add_options(engine, EngineConfig, leave_out=("seed", "max_num_seqs", "warm_up"))
    add_compilation_cache(engine)


def add_compilation_cache(parser: argparse._ActionsContainer) -> None:
    """Adds the switch of the persistent compilation cache."""
    parser.add_argument(
        "--compilation-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep compiled programs for the next start (default: true)",
    )


def sampling_of(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a command line, over the command\'s own defaults."""
    return SamplingParams(**{**defaults, **given(args, SamplingParams)})


def within_context(
    params: SamplingParams, args: argparse.Namespace, max_model_len: int
) -> SamplingParams:
    """Lowers a max_tokens that the user has not asked for to what the context can hold."""
    if "max_tokens" in given(args, SamplingParams) or params.max_tokens is None:
        return params
    return replace(params, max_tokens=min(params.max_tokens, max_model_len))


def engine_of(args: argparse.Namespace) -> EngineConfig:
    """The engine settings of a command line, for one request at a time."""
    return EngineConfig.from_kwargs(**{**_ENGINE, **given(args, EngineConfig, leave_out=("seed",))})


def check_chat_template(tokenizer: Tokenizer) -> None:
    """Raises RequestError for a model that does not say how a conversation is written."""
    if not tokenizer.has_chat_template:
        raise RequestError(
            f"{tokenizer.name} has no chat template; pass --raw to `jaxspec generate`, or choose a "
            "model that was tuned for chat"
        )


def piped_input() -> BinaryIO:
    """The bytes of standard input.

    Raises:
        RequestError: it is closed.
    """
    if sys.stdin is None:
        raise RequestError("stdin is closed; give it some text, or the prompt as an argument")
    return sys.stdin.buffer


def decode_utf8(data: bytes) -> str:
    """Text of bytes that somebody typed or piped.

    Raises:
        RequestError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it to "
            "UTF-8"
        ) from None


class OutputLost(RuntimeError):
    """An answer that cannot be shown: why, and the remedy."""


def write(text: str) -> None:
    """Shows a piece of an answer at once.

    Raises:
        OutputLost: stdout is closed, or takes no more.
        BrokenPipeError: whoever read it has gone.
    """
    if sys.stdout is None:
        raise OutputLost("stdout is closed, so that no answer can be shown; leave it open")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(
            f"stdout takes no more of the answer ({error.strerror}); make room, or write elsewhere"
        ) from None


def kernels_of(llm: LLM) -> dict[str, str]:
    """The implementation of each kernel op."""
    chosen = asdict(llm.assembled.geometry.kernels)
    del chosen["early_launch"]  # says how kernels are launched, not which
    return chosen


def print_choices(llm: LLM) -> None:
    """Shows on stderr what was decided at the start, and why."""
    table = Table("what", "choice", "reason", box=None)
    for row in llm.assembled.choices:
        table.add_row(*row)
    Console(stderr=True).print(table)


def print_figures(llm: LLM, output: RequestOutput) -> None:
    """Shows the line of figures on stderr."""
    line = figures_line(output, drafter=llm.assembled.drafter_name, kernels=kernels_of(llm))
    lossless = "" if llm.assembled.lossless else ", NOT LOSSLESS: force_accept is set"
    print(line + lossless, file=sys.stderr)
