"""Checks of arguments shared by the ops: each raises one sentence that names the argument."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def shape(name: str, array: Any, expected: tuple[int, ...], letters: str) -> None:
    """Raises unless `array` has the expected shape, shown beside its dimension letters."""
    if tuple(array.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, but {letters} needs {expected} here"
        )


def rank(name: str, array: Any, letters: str) -> None:
    """Raises unless `array` has one axis a letter of, say, "[B, N]"."""
    expected = letters.count(",") + 1
    if array.ndim != expected:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, but must be {letters}: {expected} axes"
        )


def int32(**arrays: Any) -> None:
    """Raises unless all arrays are int32: lengths, indices and positions always are."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, but must be int32; cast it")


def token(**arrays: Any) -> None:
    """Raises unless all arrays hold tokens: int32, or int64 where x64 is enabled."""
    for name, array in arrays.items():
        if array.dtype not in (jnp.dtype("int32"), jnp.dtype("int64")):
            raise ValueError(f"{name} is {array.dtype}, but tokens are int32 or int64; cast it")


def at_least(minimum: int, **sizes: int) -> None:
    """Raises unless all sizes reach the minimum."""
    for name, size in sizes.items():
        if size < minimum:
            raise ValueError(f"{name}={size} is below {minimum}; give {minimum} or more")
