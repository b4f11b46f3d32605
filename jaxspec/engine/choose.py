"""The target's choice of a token at each position of a batch, with what its mode needs for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import DraftBlock
from jaxspec.drafters.tree import ancestors
from jaxspec.logit_edits import (
    Editing,
    Preceding,
    edit_logits,
    preceding_in_chain,
    preceding_in_tree,
)
from jaxspec.mode import Mode
from jaxspec.rejection import rejection_choice
from jaxspec.sampling import SamplingRows, filtered_scores, greedy_tokens, sampling_scores


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
) -> tuple[jax.Array, jax.Array]:
    """The target's choice of each position, and where it had one to make.

    Arguments as of `token_scores`.
    Returns (token_dtype[B, N], bool[B, N]): False where the logits were not finite, or no token
    was allowed.
    """
    finite = jnp.isfinite(logits.max(-1))
    scores = token_scores(logits, positions, sampling, editing, mode=mode)
    if mode.edits:
        finite &= scores.max(-1) > -jnp.inf
    return greedy_tokens(scores), finite


def token_scores(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
) -> jax.Array:
    """What the choice of each position is the highest of: f32[B, N, V].

    logits: f32[B, N, V]. positions: i32[B, N] of the tokens to choose. sampling: leaves [B, ...].
    editing: None in modes without. mode: static; a batch without sampling rows computes neither
    noise nor filters.
    """
    if mode is Mode.GREEDY:
        return logits
    if mode is Mode.SAMPLED:
        return sampling_scores(logits, positions, sampling)
    logits = edit_logits(logits, positions, editing)
    return lax.cond(
        jnp.any(sampling.temperature > 0.0),
        lambda logits: sampling_scores(logits, positions, sampling),
        lambda logits: logits,
        logits,
    )


def token_log_probs(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
) -> jax.Array:
    """What sampled rows draw their tokens with: f32[B, N, V], -inf of what they never choose.

    Arguments as of `token_scores`.
    """
    if mode.edits:
        logits = edit_logits(logits, positions, editing)
    return jax.nn.log_softmax(filtered_scores(logits, sampling), axis=-1)


def choose_by_rejection(
    log_probs: jax.Array,
    draft: DraftBlock,
    positions: jax.Array,
    sampling: SamplingRows,
    predicted: jax.Array,
) -> jax.Array:
    """As `choose_tokens`, by classical rejection sampling in rows that sample.

    log_probs: `token_log_probs` of the block. predicted: token_dtype[B, N] the choice of greedy
    rows.
    """
    chosen = rejection_choice(
        log_probs,
        draft.log_probs,
        draft.tokens[:, 1:],
        draft.num_draft_tokens,
        sampling.key,
        positions,
    )
    return jnp.where((sampling.temperature > 0.0)[:, None], chosen, predicted)


def preceding(draft: DraftBlock, tail: jax.Array, depth: int | None) -> Preceding:
    """What stands before each position of a block of drafts; depth: of the drafter's trees."""
    if draft.parents is None:
        return preceding_in_chain(draft.tokens, tail)
    return preceding_in_tree(draft.tokens, draft.parents, ancestors(draft.parents, depth), tail)
