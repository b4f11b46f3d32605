"""Language models. Reading order: base, config, layers, decoder, llama, qwen3."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from jaxspec.models.base import KV, Block, Kernels, Target, TargetOutput
from jaxspec.models.config import ModelConfig
from jaxspec.models.llama import build_llama
from jaxspec.models.qwen3 import build_qwen3

MODELS: dict[str, Callable[..., Target]] = {"llama": build_llama, "qwen3": build_qwen3}


@functools.lru_cache(maxsize=64)
def build_target(
    config: ModelConfig,
    *,
    feature_layers: tuple[int, ...],
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
) -> Target:
    """Builds the model that `config.architecture` names; see `decoder.build_decoder`.

    Equal arguments give the same `Target`, so that programs compiled for one serve the other.

    Raises:
        ValueError: the architecture has no builder in `MODELS`.
    """
    builder = MODELS.get(config.architecture)
    if builder is None:
        raise ValueError(
            f"architecture {config.architecture!r} is not supported: "
            f"the models are {', '.join(sorted(MODELS))}"
        )
    return builder(
        config, feature_layers=feature_layers, page_size=page_size, dtype=dtype, kernels=kernels
    )


__all__ = [
    "KV",
    "MODELS",
    "Block",
    "Kernels",
    "Target",
    "TargetOutput",
    "build_target",
]
