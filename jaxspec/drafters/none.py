"""Plain decoding as a drafter: a block of one token, nothing drafted, nothing kept."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxspec.drafters.base import (
    DraftBlock,
    DraftContext,
    Drafter,
    DrafterPlan,
    DrafterSetup,
    IngestBatch,
    ModelParams,
)


def plan_none(setup: DrafterSetup) -> DrafterPlan:
    """Plain decoding needs nothing."""
    return DrafterPlan((), (), 1, 0, {}, lambda target, page_size, kernels: build_none())


@functools.lru_cache(maxsize=1)
def build_none() -> Drafter:
    """Builds the drafter that drafts nothing."""

    def draft(params: ModelParams, state: tuple, context: DraftContext) -> tuple[DraftBlock, tuple]:
        return DraftBlock(context.block.token_ids, jnp.zeros_like(context.rows)), state

    def ingest(params: ModelParams, state: tuple, batch: IngestBatch) -> tuple[tuple, tuple]:
        return state, ()

    return Drafter(
        name="none",
        num_draft_tokens=0,
        feature_layers=(),
        mask_token_id=0,
        init_state=lambda num_pages, num_slots, max_len: (),
        init_carry=lambda num_slots: (),
        draft=draft,
        ingest=ingest,
    )
