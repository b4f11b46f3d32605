"""Lossless speculative decoding for JAX: several tokens a step, the text of plain decoding.

Names are imported when they are first used, so that `jaxspec --help` does not wait for jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.future_map import FutureMap, RelayPayload
    from jaxspec.llm import LLM
    from jaxspec.request import (
        RequestError,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxspec.llm",
    "SamplingParams": "jaxspec.request",
    "RequestError": "jaxspec.request",
    "RequestOutput": "jaxspec.request",
    "StructuredOutputsParams": "jaxspec.request",
    "EngineConfig": "jaxspec.config",
    "FutureMap": "jaxspec.future_map",
    "RelayPayload": "jaxspec.future_map",
}

__all__ = [
    "LLM",
    "EngineConfig",
    "FutureMap",
    "RelayPayload",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
