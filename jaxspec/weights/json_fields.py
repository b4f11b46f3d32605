"""Reads JSON files and their fields: a value is there and of its type, or named. Host only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.models.config import Json
from jaxspec.weights.files import ModelFileError


def read_json(path: Path) -> Json:
    """Reads a JSON object.

    Raises:
        ModelFileError: the file is missing, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(path, "no such file", "the model folder is incomplete") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})", "check it") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            path, f"is not JSON ({error})", "it is truncated or corrupt, fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise ModelFileError(
            path, f"holds a {type(value).__name__}, not an object", "fetch it again"
        )
    return value


def merge_token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Joins ids given as one number, a list or nothing; order kept, no repeats.

    Raises:
        ValueError: something else than numbers.
    """
    ids: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else () if value is None else (value,):
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(f"token id {token!r} is no whole number")
            ids[token] = None
    return tuple(ids)


_REQUIRED: Any = object()


def integer(d: Json, key: str, default: Any = _REQUIRED) -> int:
    """d[key] as a whole number; an absent or null key gives the default, if there is one."""
    value = _value(d, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def number(d: Json, key: str, default: Any = _REQUIRED) -> float:
    """d[key] as a number; an absent or null key gives the default, if there is one."""
    value = _value(d, key, _REQUIRED if default is None else default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}, not a number")
    return float(value)


def boolean(d: Json, key: str, default: Any = _REQUIRED) -> bool:
    """d[key] as true or false; an absent or null key gives the default, if there is one."""
    value = _value(d, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not true or false")
    return value


def _value(d: Json, key: str, default: Any) -> Any:
    if default is _REQUIRED:
        return d[key]
    value = d.get(key)
    return default if value is None else value
