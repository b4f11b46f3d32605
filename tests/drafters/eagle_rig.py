"""Calls an EAGLE drafter as the engine does, on rows of several requests, outside of an engine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.models.base import Block, Target
from tests.models.paging import block_at

PAGE_SIZE = 4

# What the drafter borrows of a target: its params are (embedding [V, E], head [V, E]).
BORROWED = Target(
    embed=lambda params, token_ids: params[0][token_ids],
    forward=None,
    logits=lambda params, hidden: jnp.einsum("...e,ve->...v", hidden, params[1]),
    init_kv=None,
)


@functools.cache
def programs(drafter: Drafter):
    """(draft, ingest) jitted; draft takes tokens to go on with, or its own likeliest ones.

    draft: (params, state, block, carry, forced i32[B, K]) -> (DraftBlock, logits, state).
    """

    def draft(params: ModelParams, state, block: Block, carry, forced):
        seen = []

        def sample(logits, positions):
            seen.append(logits)
            return jnp.take_along_axis(forced, positions - block.lens[:, None] - 1, axis=1)

        rows = jnp.ones_like(block.lens)
        context = DraftContext(rows, block, carry, sample)
        out, state = drafter.draft(params, state, context)
        return out, jnp.concatenate(seen, axis=1), state

    def greedy(params: ModelParams, state, block: Block, carry):
        rows = jnp.ones_like(block.lens)
        context = DraftContext(rows, block, carry, None, greedy=True)
        return drafter.draft(params, state, context)

    return jax.jit(draft), jax.jit(greedy), jax.jit(drafter.ingest)


def block_of(drafter: Drafter, bonus, lens, table) -> Block:
    """The block that the engine hands to `draft`."""
    ids = np.zeros((len(lens), drafter.block_size), np.int32)
    ids[:, 0] = bonus
    return block_at(ids, lens, table, PAGE_SIZE)


def batch_of(features, next_ids, lens, num_valid, table, *, token_ids=None, rows=None):
    """An `IngestBatch`: features [B, N, F * E], of which the first num_valid[b] are committed."""
    features = jnp.asarray(features)
    token_ids = np.zeros(features.shape[:2]) if token_ids is None else token_ids
    block = block_at(token_ids, lens, table, PAGE_SIZE)
    num_valid = jnp.asarray(num_valid, jnp.int32)
    valid = np.arange(features.shape[1]) < np.asarray(num_valid)[:, None]
    locs = jnp.where(valid, block.kv_locs, block.kv_locs % PAGE_SIZE)
    return IngestBatch(
        rows=jnp.arange(1, len(lens) + 1, dtype=jnp.int32) if rows is None else jnp.asarray(rows),
        block=block.replace(kv_locs=locs),
        next_ids=jnp.asarray(next_ids, jnp.int32),
        features=features,
        num_valid=num_valid,
    )
