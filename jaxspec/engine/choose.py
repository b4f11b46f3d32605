"""The target's choice of a token at each position of a batch, with what its mode needs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import Kernels
from jaxspec.drafters.base import DraftBlock
from jaxspec.drafters.tree import ancestors
from jaxspec.logit_edits import (
    Editing,
    Preceding,
    edit_logits,
    has_penalties,
    penalise,
    preceding_in_chain,
    preceding_in_tree,
    restrict,
)
from jaxspec.mode import Mode
from jaxspec.rejection import rejection_choice
from jaxspec.sampling import SamplingRows, filtered_scores, greedy_tokens, sampling_scores
from kernels_pallas.dispatch import XLA


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """The target's choice of each position, and where it had one to make.

    Arguments as of `choice_of`.
    Returns (token_dtype[B, N], bool[B, N]): False where the logits were not finite, or no token
    was allowed.
    """
    if mode.edits:
        logits = restrict(logits, positions, editing)
        tokens = _penalised_choice(greedy_tokens, logits, positions, sampling, editing, kernels)
    else:
        tokens = choice_of(greedy_tokens, logits, positions, sampling, mode=mode, kernels=kernels)
    if mode is Mode.GREEDY:
        # What was chosen is the highest, NaN above all: no second pass over the logits.
        highest = jnp.take_along_axis(logits, tokens.astype(jnp.int32)[..., None], axis=-1)[..., 0]
    else:
        highest = logits.max(-1)
    return tokens, jnp.isfinite(highest)


def choice_of(
    choose: Callable[[jax.Array], Any],
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
    kernels: Kernels,
) -> Any:
    """`choose` of the scores f32[B, N, V] that each position's token is the highest of.

    logits: f32[B, N, V]. positions: i32[B, N] of the tokens to choose. sampling: leaves [B, ...].
    editing: None in modes without. mode: static; a batch without sampling rows computes neither
    noise nor filters. kernels: static.
    """
    if mode is Mode.GREEDY:
        return choose(logits)
    if mode is Mode.SAMPLED:
        by = kernels.filter_thresholds
        return choose(sampling_scores(logits, positions, sampling, implementation=by))
    logits = restrict(logits, positions, editing)
    return _penalised_choice(choose, logits, positions, sampling, editing, kernels)


def _penalised_choice(
    choose: Callable[[jax.Array], Any],
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing,
    kernels: Kernels,
) -> Any:
    """`choose` of restricted logits, inside the branches.

    What leaves a branch is copied, so the scores of a vocabulary do not. Where nobody has penalties
    or samples, the branch hands on what was chosen outside: XLA's reductions on CPUs are slower in
    branches. On GPUs the host waits at a branch for the device, which costs more than all of this.
    """

    def unchanged(logits: jax.Array) -> Any:
        return plain

    def penalised(logits: jax.Array) -> Any:
        return choose(penalise(logits, editing))

    def sampled(logits: jax.Array) -> Any:
        logits = penalise(logits, editing)
        return choice_of(choose, logits, positions, sampling, mode=Mode.SAMPLED, kernels=kernels)

    if kernels.filter_thresholds != XLA:
        return sampled(logits)
    plain = lax.optimization_barrier(choose(logits))
    asked = jnp.where(has_penalties(editing.rows), jnp.int32(1), jnp.int32(0))
    which = jnp.where(jnp.any(sampling.temperature > 0.0), jnp.int32(2), asked)
    return lax.switch(which, [unchanged, penalised, sampled], logits)


def token_log_probs(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    editing: Editing | None = None,
    *,
    mode: Mode,
    kernels: Kernels,
) -> jax.Array:
    """What sampled rows draw their tokens with: f32[B, N, V], -inf of what they never choose.

    Arguments as of `choice_of`.
    """
    if mode.edits:
        logits = edit_logits(logits, positions, editing)
    scores = filtered_scores(logits, sampling, implementation=kernels.filter_thresholds)
    return jax.nn.log_softmax(scores, axis=-1)


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
