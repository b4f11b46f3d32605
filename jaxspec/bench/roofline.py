"""The floor under a measurement: what the machine can compute, measured in the same run."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig

_SIZE = 2048


def matmul_flops_per_s(dtype: str, *, size: int = _SIZE, repeats: int = 5) -> float:
    """Floating-point operations a second of a large matrix product, the best of some tries."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    best = float("inf")
    for _ in range(repeats):
        before = time.perf_counter()
        jax.block_until_ready(multiply(a, a))
        best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best


def prefill_flops(config: ModelConfig, num_tokens: int) -> int:
    """Operations that a prompt cannot do without, a multiplication and an addition counted as two.

    Every layer's products for all tokens, attention to the tokens before, and the logits of the
    last token alone.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    weights = width * (heads + kv) + heads * width + 3 * width * config.intermediate_size
    attention = 2 * heads * num_tokens * (num_tokens + 1) // 2  # scores and weighted values
    per_layer = weights * num_tokens + attention
    return 2 * (config.num_layers * per_layer + width * config.vocab_size)
