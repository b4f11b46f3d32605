"""What a run needs: memory, and from it the micro-batch; arithmetic, and from it the time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.training.spec import StepSpec

_MEMORY_SHARE = 0.85  # of what is free; the estimate leaves out what XLA holds besides
_EFFICIENCY = 0.35  # of the matrix rate that a whole step reaches
_LOSS_BYTES = {"cpu": 128 << 20, "gpu": 3 << 29}  # of the logits of a chunk
_F32 = 4


@dataclass(frozen=True, slots=True)
class Needs:
    """Estimates of one step. fixed_bytes are there whatever the rows; FLOPs are of all rows."""

    fixed_bytes: int
    row_bytes: int
    flops: float

    def bytes_at(self, rows: int) -> int:
        """With so many rows at once."""
        return self.fixed_bytes + rows * self.row_bytes


def estimate(spec: StepSpec, *, row_len: int, batch_rows: int) -> Needs:
    """Counts what a step holds and multiplies, from the sizes alone."""
    if isinstance(spec.drafter, EagleConfig):
        return _estimate_eagle(spec, row_len=row_len, batch_rows=batch_rows)
    target, drafter = spec.target, spec.drafter
    item = jnp.dtype(spec.compute_dtype).itemsize
    width, vocab = target.hidden_size, target.vocab_size
    heads, kv_width = target.num_heads, target.num_kv_heads * target.head_dim
    q_width = heads * target.head_dim
    layer = width * (q_width + 2 * kv_width) + q_width * width
    layer += 3 * width * target.intermediate_size
    features = len(drafter.target_layer_ids) * width
    drafter_weights = drafter.num_layers * layer + features * width
    target_weights = target.num_layers * layer + vocab * width
    target_weights += 0 if target.tie_word_embeddings else vocab * width

    blocks = spec.num_anchors
    tokens = blocks * drafter.block_size
    slots = blocks * (drafter.block_size - 1)
    chunk = min(spec.chunk, blocks) * drafter.block_size
    # What the backward pass keeps of each layer and block token, and the largest passing arrays.
    kept = 10 * width + 3 * target.intermediate_size + 4 * (q_width + 2 * kv_width)
    passing = 6 * width + 3 * target.intermediate_size + 4 * (q_width + 2 * kv_width)
    scores = heads * row_len * (row_len * (2 * _F32 if spec.attention == "xla" else 0))
    row_bytes = (
        row_len * (features + passing) * item
        + scores
        + tokens * drafter.num_layers * kept * item
        + row_len * drafter.num_layers * 2 * kv_width * (item + _F32)
        + heads * chunk * row_len * (3 * _F32 + item)
        + slots * width * (2 * item + _F32)
    )
    loss_rows = spec.loss.chunk * (drafter.block_size - 1)
    matrices = 3 if spec.loss.soft_labels else 2
    fixed = (
        target_weights * item
        + drafter_weights * (6 * _F32 + item)  # weights, two moments, gradient, update, a copy
        + loss_rows * vocab * (2 * _F32 + item)
    )
    last_layer = target.num_layers if spec.loss.soft_labels else max(drafter.target_layer_ids) + 1
    flops = batch_rows * (
        2.0 * row_len * last_layer * (layer + row_len * q_width)
        + 6.0 * drafter.num_layers * tokens * (layer + row_len * q_width)
        + 6.0 * row_len * (features * width + drafter.num_layers * width * 2 * kv_width)
        + 2.0 * matrices * slots * width * vocab
    )
    return Needs(int(fixed), int(row_bytes), flops)


def _estimate_eagle(spec: StepSpec, *, row_len: int, batch_rows: int) -> Needs:
    """One layer over all tokens of a row, then over its chains once a further draft."""
    target, drafter = spec.target, spec.drafter
    item = jnp.dtype(spec.compute_dtype).itemsize
    width, vocab, own_vocab = target.hidden_size, target.vocab_size, drafter.draft_vocab_size
    heads, kv_width = target.num_heads, target.num_kv_heads * target.head_dim
    q_width = heads * target.head_dim
    target_layer = width * (2 * q_width + 2 * kv_width + 3 * target.intermediate_size)
    own_layer = target_layer + width * (q_width + 2 * kv_width)  # it attends from 2 E
    features = len(drafter.feature_layers) * width
    own_weights = own_layer + features * width + own_vocab * width
    target_weights = target.num_layers * target_layer + vocab * width
    target_weights += 0 if target.tie_word_embeddings else vocab * width

    num_drafts, chains = spec.loss.block_size - 1, spec.num_anchors
    rows = row_len + (num_drafts - 1) * chains  # that go through the layer
    passing = 6 * width + 3 * target.intermediate_size + 4 * (q_width + 2 * kv_width)
    kept = 12 * width + 3 * target.intermediate_size + 4 * (q_width + 2 * kv_width)
    scores = heads * row_len * max(row_len, chains) * 3 * _F32
    row_bytes = (
        row_len * (features + passing) * item
        + scores
        + rows * kept * item
        + chains * num_drafts * width * (2 * item + _F32)
    )
    loss_rows = spec.loss.chunk * num_drafts
    fixed = (
        (target_weights + own_vocab * width) * item
        + own_weights * (6 * _F32 + item)
        + loss_rows * own_vocab * 6 * _F32
    )
    flops = batch_rows * (
        2.0 * row_len * target.num_layers * (target_layer + row_len * q_width)
        + 8.0 * rows * (own_layer + row_len * q_width)
        + 6.0 * row_len * features * width
        + 2.0 * 5 * chains * num_drafts * width * own_vocab
    )
    return Needs(int(fixed), int(row_bytes), flops)


def fit_to_memory(
    spec: StepSpec,
    *,
    row_len: int,
    batch_rows: int,
    micro_batch: int | None,
    free_bytes: int,
    platform: str,
) -> StepSpec:
    """Decides how many rows, blocks and logits are in memory at once.

    The most rows that fit are taken; attention goes through a row's blocks in parts where it
    must. A single row is tried in any case.
    """
    vocab = spec.target.vocab_size
    if isinstance(spec.drafter, EagleConfig):
        vocab = 3 * spec.drafter.draft_vocab_size  # logits, their gradient and the target's
    logits_bytes = drafter_slots(spec) * vocab * (2 * _F32 + 2)
    loss_chunk = max(1, min(_LOSS_BYTES.get(platform, 3 << 29) // logits_bytes, 4096))
    spec = replace(spec, loss=replace(spec.loss, chunk=int(loss_chunk)))
    blocks = spec.num_anchors
    chunks = [blocks // parts for parts in range(1, blocks + 1) if blocks % parts == 0]
    sizes = [n for n in range(batch_rows, 0, -1) if batch_rows % n == 0]
    for rows in sizes if micro_batch is None else [micro_batch]:
        for chunk in chunks:
            fitted = replace(spec, micro_batches=batch_rows // rows, chunk=chunk)
            needs = estimate(fitted, row_len=row_len, batch_rows=batch_rows)
            if needs.bytes_at(rows) <= _MEMORY_SHARE * free_bytes:
                return fitted
    return fitted


def drafter_slots(spec: StepSpec) -> int:
    """Drafts of a block."""
    return spec.loss.block_size - 1


def free_memory(platform: str) -> int:
    """Bytes that arrays may still take: of the device, or of the host on a CPU."""
    stats = jax.devices()[0].memory_stats() or {} if platform != "cpu" else {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_flops_per_s(dtype: str, platform: str) -> float:
    """The rate of a large matrix product on this device, by a clock."""
    size = 8192 if platform == "gpu" else 512
    key = jax.random.key(0)
    a = jax.random.normal(key, (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda a, b: a @ b)
    b = product(a, a).block_until_ready()
    best = float("inf")
    for _ in range(3):
        before = time.perf_counter()
        product(a, b).block_until_ready()
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 / best


def seconds_a_step(needs: Needs, flops_per_s: float) -> float:
    """A first guess, before any step has run."""
    return needs.flops / (flops_per_s * _EFFICIENCY)
