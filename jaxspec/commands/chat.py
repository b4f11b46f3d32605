"""`jaxspec chat`: a conversation in the terminal. Host only."""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.commands.common import (
    add_engine_and_sampling,
    add_prompting,
    check_chat_template,
    decode_utf8,
    engine_of,
    piped_input,
    print_figures,
    sampling_of,
    within_context,
    write,
)
from jaxspec.config import ConfigError, check_names
from jaxspec.options import Parser
from jaxspec.progress import ProgressDisplay
from jaxspec.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

_DEFAULTS = {"temperature": 0.0, "max_tokens": 1024}
_CONTEXT = 4096  # unless asked otherwise; a conversation rarely needs a long model's all
_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    add_prompting(parser)
    add_engine_and_sampling(parser, _DEFAULTS)


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Reads turns from stdin and streams answers until /exit or the end of the input."""
    params, config = sampling_of(args, _DEFAULTS), engine_of(args)
    from jaxspec.engine.assemble import open_model
    from jaxspec.llm import LLM

    with ProgressDisplay() as progress:
        opened = open_model(config, cache_dir=cache_dir, on_progress=progress)
        check_chat_template(opened.tokenizer)
        if config.max_model_len is None:
            longest = opened.checkpoint.config.max_position_embeddings
            config = replace(config, max_model_len=min(_CONTEXT, longest))
        llm = LLM.from_config(
            config,
            lazy=True,
            cache_dir=cache_dir,
            compilation_cache=args.compilation_cache,
            on_progress=progress,
            opened=opened,
        )
    params = within_context(params, args, llm.config.max_model_len)
    session = Session(llm, params, system=args.system, enable_thinking=args.enable_thinking)
    if sys.stdin is not None and sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing for `input`)
        print(f"{config.model}: {_HELP}", file=sys.stderr)
    while (line := read_turn()) is not None:
        if line.startswith("/"):
            if not session.command(line):
                break
        elif line:
            session.answer(line)
    return 0


def read_turn() -> str | None:
    """The next line that the user says, stripped; None at the end.

    Raises:
        RequestError: what is piped in is not UTF-8.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        line = piped_input().readline()
        return decode_utf8(line).strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        return ""


class Session:
    """A conversation so far and the model that takes part in it."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        enable_thinking: bool | None = None,
    ):
        self._llm = llm
        self._params = params
        self._enable_thinking = enable_thinking
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def command(self, line: str) -> bool:
        """Does what a line with a slash says; False to leave."""
        try:
            check_names("command", [line], ["/reset", "/exit", "/help"])
        except ConfigError as error:
            print(error, file=sys.stderr)
            return True
        if line == "/reset":
            self.messages = list(self._opening)
        elif line == "/help":
            print(_HELP, file=sys.stderr)
        return line != "/exit"

    def answer(self, line: str) -> None:
        """Streams the answer to a turn; Ctrl-C ends it and keeps what was said.

        A turn that cannot be served is reported, and is not part of the conversation.
        """
        turn = {"role": "user", "content": line}
        try:
            stream = self._llm.stream_chat(
                [*self.messages, turn], self._params, enable_thinking=self._enable_thinking
            )
        except RequestError as error:
            print(f"{error} (/reset forgets the conversation)", file=sys.stderr)
            return
        text = ""
        try:
            with stream:
                with ProgressDisplay() as progress:
                    progress("reading", 0, 0)  # the first turns also compile
                    first = next(stream)
                for delta in itertools.chain([first], stream):
                    write(delta.text)
                    text += delta.text
        except KeyboardInterrupt:
            write(" [stopped]")
        write("\n")
        output = stream.output
        if output is not None and output.error is not None:
            print(f"jaxspec: the request failed: {output.error}", file=sys.stderr)
            return
        self.messages += [turn, {"role": "assistant", "content": text}]
        if output is not None and output.finished:
            print_figures(self._llm, output)
