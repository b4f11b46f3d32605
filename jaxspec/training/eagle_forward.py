"""What an EAGLE-3 drafter makes of packed rows, and its loss over its own vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.layers import logits_of
from jaxspec.training.anchors import Labels, before_labels, labels_of
from jaxspec.training.eagle import EagleTarget, chain_hidden
from jaxspec.training.loss import LossSpec, SlotSums, slot_weights
from jaxspec.training.spec import StepSpec
from jaxspec.training.target import build_dense_forward


def build_eagle_forward(spec: StepSpec):
    """(params, `EagleTarget`, rows, anchors) -> (numerator of the loss, (sums, lengths))."""
    dtype = jnp.dtype(spec.compute_dtype)
    dense = build_dense_forward(
        spec.target,
        feature_layers=spec.feature_layers,
        with_hidden=True,
        attention=spec.attention,
    )

    def forward(params, frozen: EagleTarget, rows, anchors):
        with jax.named_scope("target"):
            seen = jax.lax.stop_gradient(dense(frozen.params, rows))
        labels = labels_of(rows, anchors, spec.loss.block_size)
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        with jax.named_scope("drafter"):
            hidden = chain_hidden(
                params,
                spec.drafter,
                seen.features,
                frozen.params.embed,
                rows,
                anchors,
                labels.token_ids,
            )
        with jax.named_scope("loss"):
            teacher = before_labels(seen.hidden, labels)
            return chain_loss(hidden, params.lm_head, labels, teacher, frozen, spec.loss)

    return forward


def chain_loss(
    hidden: jax.Array,
    head: jax.Array,
    labels: Labels,
    teacher: jax.Array,
    frozen: EagleTarget,
    spec: LossSpec,
) -> tuple[jax.Array, tuple[SlotSums, jax.Array]]:
    """Sums the weighted loss of all drafts of all chains.

    A label outside the drafter's vocabulary cannot be drafted: it ends an accepted run, and has no
    loss. The target's distribution is taken over the drafter's vocabulary alone.

    Args:
        hidden: [R, A, K, E], after the drafter's norm.
        head: [V_draft, E], trained.
        labels: of each draft.
        teacher: [R, A, K, E] what the target's head read when it chose the label.
        frozen: the target and the drafter's vocabulary.
        spec: weights, share of soft labels, and chunk: chains whose logits are in memory at once.

    Returns:
        As `block_loss`, with gradients for `hidden` and `head`.
    """
    num_drafts = hidden.shape[2]
    vocab = frozen.params.embed.shape[0]
    draft_ids = jnp.full((vocab,), -1, jnp.int32)
    numbers = jnp.arange(len(frozen.target_ids), dtype=jnp.int32)
    draft_ids = draft_ids.at[frozen.target_ids].set(numbers)[labels.token_ids]
    target_head = frozen.params.head[frozen.target_ids]

    num_chains = hidden.shape[0] * hidden.shape[1]
    chunk = min(spec.chunk, num_chains)
    missing = -num_chains % chunk

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(num_chains, *x.shape[2:])
        padded = jnp.pad(flat, ((0, missing), *((0, 0),) * (flat.ndim - 1)))  # not valid
        return padded.reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint  # the logits of all chains together would not fit
    def of_chunk(head, hidden, teacher, draft_ids, valid):
        logits = logits_of(hidden, head)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        known = draft_ids >= 0
        chosen = jnp.take_along_axis(log_probs, jnp.maximum(draft_ids, 0)[..., None], axis=-1)
        chosen = chosen[..., 0]
        weights, norm = slot_weights(chosen, valid & known, spec)
        losses = -(1 - spec.soft_labels) * chosen
        if spec.soft_labels:
            wanted = jax.nn.softmax(logits_of(teacher, target_head), axis=-1)
            losses -= spec.soft_labels * (wanted * log_probs).sum(-1)
        correct = (chosen >= log_probs.max(-1)) & valid & known
        has_label = valid[:, 0]
        lengths = jnp.cumprod(correct.astype(jnp.float32), axis=1).sum(1) + 1
        loss = (weights * losses).sum()
        sums = SlotSums(
            correct=correct.sum(0, dtype=jnp.float32),
            seen=valid.sum(0, dtype=jnp.float32),
            accept_length=jnp.where(has_label, lengths, 0.0).sum(),
            blocks=has_label.sum(dtype=jnp.float32),
            loss=loss,
            norm=norm,
        )
        return sums, lengths

    def add(total, part):
        sums, lengths = of_chunk(head, *part)
        return jax.tree.map(jnp.add, total, sums), lengths

    zeros, slots = jnp.zeros((), jnp.float32), jnp.zeros((num_drafts,), jnp.float32)
    start = SlotSums(slots, slots, zeros, zeros, zeros, zeros)
    parts = (split(hidden), split(teacher), split(draft_ids), split(labels.valid))
    sums, lengths = jax.lax.scan(add, start, parts)
    lengths = lengths.reshape(-1)[:num_chains].reshape(hidden.shape[:2])
    return sums.loss, jax.lax.stop_gradient((sums, lengths))
