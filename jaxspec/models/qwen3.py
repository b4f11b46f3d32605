"""Qwen3 dense: queries and keys are normed per head before the rotary embedding."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.models.base import Kernels, Target
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import build_decoder


def build_qwen3(
    config: ModelConfig,
    *,
    feature_layers: tuple[int, ...],
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
) -> Target:
    """Builds a Qwen3; see `build_decoder`.

    Raises:
        ValueError: the config has no q/k norms, which every Qwen3 has.
    """
    if not config.qk_norm:
        raise ValueError("a qwen3 model norms q and k, but qk_norm is False; use llama")
    return build_decoder(
        config, feature_layers=feature_layers, page_size=page_size, dtype=dtype, kernels=kernels
    )
