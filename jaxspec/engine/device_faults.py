"""What it means when the device refuses a step, in words that name a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxspec.config import ConfigError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
REMEDY = (
    "lower gpu_memory_utilization, kv_cache_tokens, max_num_seqs or max_num_batched_tokens, or end "
    "what else uses the device"
)


class DeviceFault(RuntimeError):
    """The device is of no more use to this engine; requests that were in it have failed.

    outputs: what the step has changed, the failed requests with their errors.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs


class EngineFault(RuntimeError):
    """A step went wrong by a fault of the engine, its cause; every request has failed with it.

    The engine serves on. outputs: as `DeviceFault`'s.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs


class StateLost(Exception):
    """The engine's state went with a step that failed; inside the engine only."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns the device's lack of memory into a sentence.

    Raises:
        ConfigError: the device ran out of memory in the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(describe_fault(error, what)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """True of jax's error about device memory."""
    return _OUT_OF_MEMORY in str(error)


def describe_fault(error: BaseException, what: str) -> str:
    """One sentence: what failed, why, and what to do."""
    if is_out_of_memory(error):
        return f"the device ran out of memory {what}; {REMEDY}"
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return f"the device failed {what} ({reason}); start again, and report it if it comes back"
