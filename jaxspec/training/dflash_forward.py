"""What a DFlash drafter makes of packed rows, and its loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.models.layers import embed_tokens
from jaxspec.training.anchors import before_labels, labels_of
from jaxspec.training.dflash import block_hidden, block_ids
from jaxspec.training.loss import block_loss
from jaxspec.training.spec import StepSpec
from jaxspec.training.target import build_dense_forward


def build_dflash_forward(spec: StepSpec):
    """(params, target params, rows, anchors) -> (numerator of the loss, (sums, lengths))."""
    dtype = jnp.dtype(spec.compute_dtype)
    dense = build_dense_forward(
        spec.target,
        feature_layers=spec.feature_layers,
        with_hidden=spec.loss.soft_labels > 0,
        attention=spec.attention,
    )

    def forward(params, target, rows, anchors):
        with jax.named_scope("target"):
            seen = jax.lax.stop_gradient(dense(target, rows))
        labels = labels_of(rows, anchors, spec.drafter.block_size)
        with jax.named_scope("drafter"):
            hidden = block_hidden(
                jax.tree.map(lambda p: p.astype(dtype), params),
                spec.drafter,
                seen.features,
                embed_tokens(target.embed, block_ids(rows, anchors, spec.drafter)),
                rows,
                anchors,
                chunk=spec.chunk,
            )
        teacher = None if seen.hidden is None else before_labels(seen.hidden, labels)
        with jax.named_scope("loss"):
            return block_loss(hidden, target.head, labels, teacher, spec.loss)

    return forward
