"""The Llama family: SmolLM2, Llama 3.x. Optional biases and Llama 3 rope scaling, no q/k norm."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.models.base import Kernels, Target
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import build_decoder


def build_llama(
    config: ModelConfig,
    *,
    feature_layers: tuple[int, ...],
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
) -> Target:
    """Builds a Llama; see `build_decoder`.

    Raises:
        ValueError: the config asks for q/k norms, which the architecture does not have.
    """
    if config.qk_norm:
        raise ValueError("a llama model has no q/k norm, but qk_norm is True; use qwen3")
    return build_decoder(
        config, feature_layers=feature_layers, page_size=page_size, dtype=dtype, kernels=kernels
    )
