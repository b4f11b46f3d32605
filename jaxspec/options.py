"""Command-line options made from the settings' dataclasses, so that both agree. Host only."""

from __future__ import annotations

import argparse
import difflib
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn


class UsageError(ValueError):
    """A command line that cannot be understood: what, and the remedy."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34)


def parse(
    parser: Parser, commands: Mapping[str, Parser], argv: Sequence[str]
) -> argparse.Namespace:
    """Parses a command line; an unknown command or option is an error with the near match.

    commands: the subparsers, by the names of the commands.

    Raises:
        UsageError: the command line cannot be understood.
    """
    first = argv[0] if argv else ""
    if first.startswith("-") and first not in parser._option_string_actions:
        raise UsageError(f"{first!r} stands before the command; put options behind it")
    if first and not first.startswith("-"):
        _check_name("command", first, list(commands))
        # Before parsing, which would take the value of an unknown option for something else.
        _check_options(commands[first], argv[1:])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; put quotes around a prompt")
    return args


def _check_options(parser: Parser, argv: Sequence[str]) -> None:
    if argv and argv[0] in (commands := _commands_of(parser)):
        return _check_options(commands[argv[0]], argv[1:])
    known = parser._option_string_actions
    for token in itertools.takewhile(lambda token: token != "--", argv):
        # What is known in part, such as -5 for a number, is left to the parser.
        is_option = token.startswith("--") or (token[:1] == "-" and token[1:].isalpha())
        if is_option:
            _check_name("option", token.partition("=")[0], list(known))


def _commands_of(parser: Parser) -> Mapping[str, Parser]:
    """The commands below a command, where it has any."""
    return parser._subparsers._group_actions[0].choices if parser._subparsers else {}


def _check_name(kind: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise _unknown(kind, name, known)


def _unknown(kind: str, name: str, known: list[str]) -> UsageError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")


def add_options(
    parser: argparse._ActionsContainer,
    settings: type,
    *,
    leave_out: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
) -> None:
    """Adds an option for each field of a dataclass that has a help text.

    What is not given on the command line is left out of the namespace; see `given`.

    defaults: what the command uses instead of the dataclass's own, for the help text.
    """
    hints = typing.get_type_hints(settings)
    for each in fields(settings):
        if "help" in each.metadata and each.name not in leave_out:
            default = (defaults or {}).get(each.name, each.default)
            _add_option(parser, each, hints[each.name], default)


def given(
    args: argparse.Namespace, settings: type, *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """The values that the command line holds for a dataclass's fields.

    An option that may be repeated comes as a tuple, as its field is.
    """
    names = [each.name for each in fields(settings) if each.name not in leave_out]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def read_settings(settings: type, words: Sequence[str]) -> dict[str, Any]:
    """Values of a dataclass's fields from words such as `tree_nodes=32`.

    Raises:
        UsageError: an unknown name, or a value of another type.
    """
    hints = typing.get_type_hints(settings)
    known = [each.name for each in fields(settings) if "help" in each.metadata]
    values = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise UsageError(f"{word!r} is no setting; write name=value")
        _check_name("setting", name, known)
        kind, is_list = _element(hints[name])
        if is_list or kind is bool:
            raise UsageError(f"{name} cannot be set here; give it as an option of all")
        try:
            values[name] = _READERS[kind](text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{name}: {error}") from None
    return values


def _add_option(parser: argparse._ActionsContainer, each: Field, hint: Any, default: Any) -> None:
    flag = "--" + each.name.replace("_", "-")
    text = each.metadata["help"].replace("%", "%%")
    if default is not None and default != ():
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text += f" (default: {str(default).lower() if isinstance(default, bool) else shown})"
    common: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    kind, is_list = _element(hint)
    common["type"] = _READERS[kind]
    common["metavar"] = _METAVARS[kind]
    if is_list:
        common["action"] = "append"
        common["help"] = text + "; may be repeated"
    parser.add_argument(flag, **common)


def _element(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def read_int(text: str) -> int:
    """A whole number from the command line."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_READERS: dict[type, Callable[[str], Any]] = {int: read_int, float: _read_float, str: str}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
