"""Prompt lookup: drafts what followed the last occurrence of the request's latest n-gram.

Needs no weights and works with every model. Source: "prompt lookup decoding" (Saxena, 2023),
the `ngram` method of vLLM.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.config import Kernels
from jaxspec.drafters.base import (
    DraftBlock,
    DraftContext,
    Drafter,
    DrafterPlan,
    DrafterSetup,
    IngestBatch,
    ModelParams,
)
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Target

DEFAULT_BLOCK_SIZE = 8


def plan_ngram(setup: DrafterSetup) -> DrafterPlan:
    """Takes the block size and the longest n-gram from the engine's settings."""
    block_size = setup.config.block_size or DEFAULT_BLOCK_SIZE

    def build(target: Target, page_size: int, kernels: Kernels) -> Drafter:
        return build_ngram(
            num_draft_tokens=block_size - 1, ngram_max=setup.config.ngram_max, page_size=page_size
        )

    return DrafterPlan((), (), block_size, 0, {}, build)


@flax.struct.dataclass
class History:
    """tokens: token_dtype[P, G], beside the KV of each. Of a request's pages only positions below
    its seq_len are its own; the rest is a previous owner's."""

    tokens: jax.Array


@functools.lru_cache(maxsize=32)
def build_ngram(*, num_draft_tokens: int, ngram_max: int, page_size: int) -> Drafter:
    """Builds the n-gram drafter.

    num_draft_tokens: K. ngram_max: longest n-gram looked up; shorter ones serve where it is new.
    page_size: G, as the target's KV.
    """

    def init_state(num_pages: int, num_slots: int, max_len: int) -> History:
        return History(jnp.zeros((num_pages, page_size), token_dtype()))

    def draft(
        params: ModelParams, state: History, context: DraftContext
    ) -> tuple[DraftBlock, History]:
        bonus = context.block.token_ids[:, :1]
        seq_lens = context.block.lens
        table = context.block.page_table
        history = state.tokens[table].reshape(table.shape[0], -1)
        start, found_len = _last_match(history, bonus[:, 0], seq_lens, ngram_max)
        # Position seq_len is the bonus token, which the history does not hold yet; a match next
        # to it runs into it and goes on from the drafts themselves: token p repeats token p - d.
        period = seq_lens - start
        offset = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, :] % period[:, None]
        known = jnp.concatenate([history, bonus], axis=1)
        source = start[:, None] + 1 + offset
        source = jnp.where(source == seq_lens[:, None], history.shape[1], source)
        drafts = jnp.take_along_axis(known, source, axis=1)
        count = jnp.where(found_len > 0, num_draft_tokens, 0).astype(jnp.int32)
        return DraftBlock(jnp.concatenate([bonus, drafts], axis=1), count), state

    def ingest(params: ModelParams, state: History, batch: IngestBatch) -> tuple[History, tuple]:
        locs = batch.block.kv_locs
        places = locs // page_size, locs % page_size
        return History(state.tokens.at[places].set(batch.block.token_ids)), ()

    return Drafter(
        name="ngram",
        num_draft_tokens=num_draft_tokens,
        feature_layers=(),
        mask_token_id=0,
        init_state=init_state,
        init_carry=lambda num_slots: (),
        draft=draft,
        ingest=ingest,
    )


def _last_match(
    history: jax.Array, bonus: jax.Array, seq_lens: jax.Array, ngram_max: int
) -> tuple[jax.Array, jax.Array]:
    """Where the latest n-gram, bonus token included, ended before, and how long the match is.

    Prefers the longest match, then the latest. history: token_dtype[B, C]. bonus: token_dtype[B].
    Returns end positions i32[B] (0 where there is none) and lengths i32[B], 0..ngram_max.
    Example: history 5 6 7 5 6, bonus 7: ends at 2 with length 3 (5 6 7).
    """
    width = history.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None, :]
    running = (history == bonus[:, None]) & (position < seq_lens[:, None])
    running_once, length = running, running.astype(jnp.int32)
    for back in range(1, ngram_max):
        source = jnp.clip(seq_lens - back, 0, width - 1)[:, None]
        wanted = jnp.take_along_axis(history, source, axis=1)
        shifted = jnp.pad(history, ((0, 0), (back, 0)))[:, :width]
        running &= (shifted == wanted) & (position >= back) & (seq_lens[:, None] >= back)
        length += running.astype(jnp.int32)
    best = jnp.max(jnp.where(running_once, length * width + position, 0), axis=1)
    return best % width, best // width
