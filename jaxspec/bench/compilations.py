"""Counts compilations, so that a run can show that it had none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(slots=True)
class Compilations:
    """How many programs were compiled, or taken out of the compilation cache."""

    count: int = 0
    duration_s: float = 0.0


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts what is compiled inside the block."""
    found = Compilations()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            found.count += 1
            found.duration_s += duration_secs

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)
