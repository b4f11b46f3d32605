"""Holds the fields of a settings dataclass to their annotations. Host only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _all(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(check(each) for each in value)


def _is_number_of_whole(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_whole(key) and _is_number(each) for key, each in value.items()
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# Annotation as written in the source -> (what it admits, in words).
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (_is_text, "text"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "tuple[str, ...]": (_all(_is_text), "text or a list of texts"),
    "tuple[int, ...]": (_all(_is_whole), "a list of whole numbers"),
    "dict[int, float]": (_is_number_of_whole, "a number for each of some whole numbers"),
}


def check_field_types(settings: Any, error: type[ValueError]) -> None:
    """Raises `error` for the first field whose value is not of its annotated type.

    An annotation that `_TYPES` does not know is left to the class itself.
    """
    for field in fields(settings):
        annotation = str(field.type)
        optional = annotation.endswith(" | None")
        check, words = _TYPES.get(annotation.removesuffix(" | None"), (None, ""))
        value = getattr(settings, field.name)
        if check is None or (optional and value is None) or check(value):
            continue
        alternative = ", or None" if optional else ""
        raise error(f"{field.name} is {value!r}; it must be {words}{alternative}")
