"""The floor under a measurement: what the machine moves and computes, measured in the same run."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.models.config import ModelConfig
from kernels_pallas.roofline import copy_bandwidth

_SIZE = 2048


class Machine(NamedTuple):
    """What this machine reaches at best."""

    copy_bytes_per_s: float  # bytes read and written by a copy of a large array
    flops_per_s: float  # of a large matrix product


class Work(NamedTuple):
    """What a step cannot do without: each weight and each KV row in use read once, all products."""

    num_bytes: int
    flops: int

    def floor_s(self, machine: Machine) -> float:
        """The larger of the times that moving and computing take."""
        return max(self.num_bytes / machine.copy_bytes_per_s, self.flops / machine.flops_per_s)


def measure_machine(dtype: str) -> Machine:
    """Copies 4 GB and multiplies 8192 x 8192 matrices on a GPU; on a CPU far less of both."""
    size = 8192 if jax.devices()[0].platform == "gpu" else 512
    return Machine(1e6 * copy_bandwidth(), matmul_flops_per_s(dtype, size=size))


def matmul_flops_per_s(dtype: str, *, size: int = _SIZE, repeats: int = 5) -> float:
    """Floating-point operations a second of a product of random matrices, the best of some tries.

    Random, since products of equal numbers take less power and run faster.
    """
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    return 2 * size**3 / _best_s(jax.jit(jnp.matmul), a, a, repeats=repeats)


def _best_s(function, *args: jax.Array, repeats: int, in_a_row: int = 4) -> float:
    """Seconds of a call; several in a row, so that the host's part of one hides behind another."""
    jax.block_until_ready(function(*args))
    best = float("inf")
    for _ in range(repeats):
        before = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(in_a_row)])
        best = min(best, (time.perf_counter() - before) / in_a_row)
    return best


def prefill_flops(config: ModelConfig, num_tokens: int) -> int:
    """Operations that a prompt cannot do without, a multiplication and an addition counted as two.

    Every layer's products for all tokens, attention to the tokens before, and the logits of the
    last token alone.
    """
    heads = config.num_heads * config.head_dim
    attention = 2 * heads * num_tokens * (num_tokens + 1) // 2  # scores and weighted values
    per_layer = _layer_weights(config) * num_tokens + attention
    return 2 * (config.num_layers * per_layer + config.hidden_size * config.vocab_size)


def plain_step(config: ModelConfig, *, batch: int, context: float, itemsize: int) -> Work:
    """A step of plain decoding: one token of each of `batch` requests with `context` rows of KV.

    Of operations only products with weights count, so that the floor is not set too high.
    """
    return _target_step(config, batch=batch, block=1, context=context, itemsize=itemsize)


def dflash_step(
    config: ModelConfig,
    drafter: DFlashConfig,
    *,
    block: int,
    batch: int,
    context: float,
    itemsize: int,
) -> Work:
    """A step with DFlash: draft a block, verify it, and make context KV of what was committed.

    The head is read twice, for the drafts and for the target's choices: the second cannot begin
    before the first has ended. The drafter's K and V weights, which draft and context share, count
    once.
    """
    target = _target_step(config, batch=batch, block=block, context=context, itemsize=itemsize)
    mix = drafter.hidden_size * len(drafter.target_layer_ids) * drafter.target_hidden_size
    head = config.hidden_size * config.vocab_size
    layers = drafter.num_layers * _layer_weights(drafter) + mix
    return Work(
        target.num_bytes
        + round((layers + head + _kv_numbers(drafter, batch, context + block)) * itemsize),
        target.flops + 2 * batch * (layers * block + head * (block - 1)),
    )


def eagle3_step(
    config: ModelConfig,
    drafter: EagleConfig,
    *,
    block: int,
    batch: int,
    context: float,
    itemsize: int,
) -> Work:
    """A step with EAGLE-3: draft a chain, verify it, and ingest what was committed.

    The layer and the head are read for every draft: none can begin before the one before it has
    ended, and no cache holds them. The first draft is the ingest's, of the step before; each of the
    others takes a pass over one token.
    """
    target = _target_step(config, batch=batch, block=block, context=context, itemsize=itemsize)
    more = drafter.input_size - drafter.hidden_size
    more *= (drafter.num_heads + 2 * drafter.num_kv_heads) * drafter.head_dim
    layer, mix = _layer_weights(drafter) + more, drafter.hidden_size * drafter.fc_size
    head, drafts = drafter.hidden_size * drafter.draft_vocab_size, block - 1
    numbers = drafts * (layer + head + _kv_numbers(drafter, batch, context + block)) + mix
    return Work(
        target.num_bytes + round(numbers * itemsize),
        target.flops + 2 * batch * (block * (layer + mix) + (drafts - 1) * layer + drafts * head),
    )


def _target_step(
    config: ModelConfig, *, batch: int, block: int, context: float, itemsize: int
) -> Work:
    head = config.hidden_size * config.vocab_size
    weights = config.num_layers * _layer_weights(config) + head
    return Work(
        round((weights + _kv_numbers(config, batch, context + block)) * itemsize),
        2 * weights * batch * block,
    )


def _kv_numbers(config: ModelConfig | DFlashConfig | EagleConfig, batch: int, rows: float) -> float:
    """Numbers in the KV rows of a batch, all layers."""
    return batch * rows * config.num_layers * 2 * config.num_kv_heads * config.head_dim


def _layer_weights(config: ModelConfig | DFlashConfig | EagleConfig) -> int:
    """Numbers in the matrices of one decoder layer."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    return width * (heads + kv) + heads * width + 3 * width * config.intermediate_size
