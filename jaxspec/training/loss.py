"""Cross-entropy of every slot under the target's frozen head, a few blocks at a time.

The logits of all blocks together would be tens of gigabytes. Since the head has no gradient, the
gradient of the hidden states is made in the same pass as the loss and logits are dropped at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.models.layers import logits_of
from jaxspec.training.anchors import Labels, slot_decay
from jaxspec.training.config import WEIGHTINGS

_DPACE_FLOOR = 0.5  # alpha of D-PACE


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The static side of the loss.

    weighting: "decay": exp(-(k-1)/gamma), normalised by the sum of weights (DFlash, arXiv
        2602.06036); "dpace": see `dpace_weights`, normalised by the number of blocks.
    gamma: of the decay; None takes the paper's for the block size.
    soft_labels: share of the loss that is the cross-entropy with the target's own distribution
        instead of the token that it chose.
    chunk: blocks whose logits are in memory at once.
    """

    block_size: int
    weighting: str = "decay"
    gamma: float | None = None
    soft_labels: float = 0.0
    chunk: int = 128

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise ValueError(
                f"loss is {self.weighting!r}; it must be one of {', '.join(WEIGHTINGS)}"
            )


@flax.struct.dataclass
class SlotSums:
    """Raw sums over blocks; ratios are made where they are shown.

    correct, seen: f32[K] slots whose best token is the label, and slots that have one.
    accept_length: f32[] the leading correct slots + 1 of each block, summed.
    blocks: f32[]. loss, norm: f32[] numerator and denominator of the loss.
    """

    correct: jax.Array
    seen: jax.Array
    accept_length: jax.Array
    blocks: jax.Array
    loss: jax.Array
    norm: jax.Array


class _Chunk(NamedTuple):
    """C blocks. hidden [C, K, E], labels i32[C, K], valid bool[C, K], teacher [C, K, E] | None."""

    hidden: jax.Array
    labels: jax.Array
    valid: jax.Array
    teacher: jax.Array | None


def dpace_weights(log_probs: jax.Array, valid: jax.Array) -> jax.Array:
    """How much a slot's loss matters for the length that is accepted.

    w_j = sum over m >= j of the product over i <= m of ((1 - alpha) q_i + alpha), with q_i the
    drafter's probability of the label at slot i (D-PACE, arXiv 2605.18810). A slot without a
    label counts as factor 1 and adds no term.

    Args:
        log_probs: f32[C, K] of the labels; no gradient passes.
        valid: bool[C, K].

    Returns:
        f32[C, K], 0 where not valid.
    """
    smooth = (1 - _DPACE_FLOOR) * jnp.exp(jax.lax.stop_gradient(log_probs)) + _DPACE_FLOOR
    reach = jnp.cumprod(jnp.where(valid, smooth, 1.0), axis=1)
    terms = jnp.where(valid, reach, 0.0)
    suffix = jnp.cumsum(terms[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(valid, suffix, 0.0)


def block_loss(
    hidden: jax.Array,
    head: jax.Array,
    labels: Labels,
    teacher: jax.Array | None,
    spec: LossSpec,
) -> tuple[jax.Array, tuple[SlotSums, jax.Array]]:
    """Sums the weighted loss of all slots of all blocks.

    Args:
        hidden: [R, A, K, E], after the drafter's norm.
        head: [V, E], frozen.
        labels: of each slot.
        teacher: [R, A, K, E] what the target's head read when it chose the label; with
            `soft_labels` only.
        spec: weights and chunking.

    Returns:
        The numerator of the loss, with a gradient for `hidden`; the sums; and f32[R, A] the
        leading correct slots of each block + 1. Divide the numerator by `sums.norm`, over all
        micro-batches of a step together.
    """
    num_slots, width = hidden.shape[-2:]
    blocks = _Chunk(
        hidden.reshape(-1, num_slots, width),
        labels.token_ids.reshape(-1, num_slots),
        labels.valid.reshape(-1, num_slots),
        None if teacher is None else teacher.reshape(-1, num_slots, width),
    )
    loss, sums, lengths = _summed(blocks.hidden, blocks._replace(hidden=None), head, spec)
    return loss, (sums, lengths.reshape(hidden.shape[:2]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(
    hidden: jax.Array, rest: _Chunk, head: jax.Array, spec: LossSpec
) -> tuple[jax.Array, SlotSums, jax.Array]:
    sums, lengths, _ = _over_chunks(hidden, rest, head, spec, with_grad=False)
    return sums.loss, sums, lengths


def _summed_fwd(hidden, rest, head, spec):
    sums, lengths, grad = _over_chunks(hidden, rest, head, spec, with_grad=True)
    return (sums.loss, sums, lengths), grad


def _summed_bwd(spec, grad, cotangents):
    loss_cotangent, *_ = cotangents
    return grad * loss_cotangent.astype(grad.dtype), None, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _over_chunks(
    hidden: jax.Array, rest: _Chunk, head: jax.Array, spec: LossSpec, *, with_grad: bool
) -> tuple[SlotSums, jax.Array, jax.Array | None]:
    """Sums over chunks of blocks, each block's length, the gradient of the loss for `hidden`."""
    num_blocks = hidden.shape[0]
    chunk = min(spec.chunk, num_blocks)
    missing = -num_blocks % chunk

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))  # no label: weight 0
        return padded.reshape(-1, chunk, *x.shape[1:])

    chunks = jax.tree.map(split, rest._replace(hidden=hidden))
    zeros = jnp.zeros((), jnp.float32)
    slots = jnp.zeros((hidden.shape[1],), jnp.float32)
    start = SlotSums(slots, slots, zeros, zeros, zeros, zeros)

    def add(sums: SlotSums, part: _Chunk) -> tuple[SlotSums, tuple[jax.Array, jax.Array | None]]:
        more, *of_blocks = _chunk_loss(part, head, spec, with_grad=with_grad)
        return jax.tree.map(jnp.add, sums, more), tuple(of_blocks)

    sums, of_blocks = jax.lax.scan(add, start, chunks)
    lengths, grads = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_blocks], of_blocks)
    return sums, lengths, grads


def _chunk_loss(
    part: _Chunk, head: jax.Array, spec: LossSpec, *, with_grad: bool
) -> tuple[SlotSums, jax.Array, jax.Array | None]:
    logits = logits_of(part.hidden, head)
    top = logits.max(axis=-1)
    log_total = top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))
    chosen = jnp.take_along_axis(logits, part.labels[..., None], axis=-1)[..., 0]
    log_probs = chosen - log_total
    weights, norm = slot_weights(log_probs, part.valid, spec)

    losses = -(1 - spec.soft_labels) * log_probs
    if spec.soft_labels:
        wanted = jax.nn.softmax(logits_of(part.teacher, head), axis=-1)
        losses += spec.soft_labels * (log_total - jnp.sum(wanted * logits, axis=-1))
    correct = (chosen >= top) & part.valid
    has_label = part.valid[:, 0]
    accepted = jnp.cumprod(correct.astype(jnp.float32), axis=1).sum(1) + 1
    sums = SlotSums(
        correct=correct.sum(0, dtype=jnp.float32),
        seen=part.valid.sum(0, dtype=jnp.float32),
        accept_length=jnp.where(has_label, accepted, 0.0).sum(),
        blocks=has_label.sum(dtype=jnp.float32),
        loss=(weights * losses).sum(),
        norm=norm,
    )
    if not with_grad:
        return sums, accepted, None
    # d loss / d logits = w (p - wanted); the one-hot part of `wanted` is a row of the head.
    error = jnp.exp(logits - log_total[..., None])
    if spec.soft_labels:
        error -= spec.soft_labels * wanted
    error = (weights[..., None] * error).astype(head.dtype)
    grad = jnp.einsum("ckv,ve->cke", error, head, preferred_element_type=jnp.float32)
    label_rows = head.at[part.labels].get(mode="clip").astype(jnp.float32)
    grad -= (1 - spec.soft_labels) * weights[..., None] * label_rows
    return sums, accepted, grad.astype(part.hidden.dtype)


def slot_weights(
    log_probs: jax.Array, valid: jax.Array, spec: LossSpec
) -> tuple[jax.Array, jax.Array]:
    """(f32[C, K] weights, f32[] what the summed loss is divided by)."""
    if spec.weighting == "dpace":
        # Divided by the sum of weights, the credit for longer runs would cancel out.
        return dpace_weights(log_probs, valid), valid[:, 0].sum(dtype=jnp.float32)
    decay = jnp.asarray(slot_decay(spec.block_size, spec.gamma))[None]
    weights = jnp.where(valid, decay, 0.0)
    return weights, weights.sum()
