"""A drafter of which fewer drafts are verified, or none: the same state, the same KV."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec.cache.kv_pages import kv_locs_at, to_null_page
from jaxspec.drafters.base import (
    Carry,
    DraftBlock,
    DraftContext,
    Drafter,
    IngestBatch,
    ModelParams,
    State,
)
from jaxspec.models.base import Block


def widths_of(drafter: Drafter) -> tuple[int, ...]:
    """Blocks that can be verified, the widest first: all drafts, half a chain of them, none."""
    full = drafter.block_size
    if full == 1:
        return (1,)
    if drafter.depth is not None or full < 4:
        return (full, 1)
    return (full, full // 2, 1)


@functools.lru_cache(maxsize=64)
def narrow(drafter: Drafter, width: int, page_size: int) -> Drafter:
    """`drafter` with blocks of `width` tokens of which it drafts as many as ever.

    A drafter that was trained for a block drafts worse in a shorter one, so the target's pass alone
    is shortened. A width of 1 is plain decoding: nothing is drafted, but the drafter still ingests
    what is committed, so that it can draft again at any step, with the KV of one that always did.

    Raises:
        ValueError: a width outside 1..N, or a tree cut short.
    """
    full = drafter.block_size
    if not 1 <= width <= full or (drafter.depth is not None and 1 < width < full):
        raise ValueError(f"a block of {full} tokens cannot be verified as one of {width}")
    if width == full:
        return drafter

    def draft(params: ModelParams, state: State, context: DraftContext) -> tuple[DraftBlock, State]:
        if width == 1:
            none = jnp.zeros_like(context.rows)
            return DraftBlock(context.block.token_ids, none), state
        wide = context.replace(block=_widened(context.block, full, drafter, page_size))
        out, state = drafter.draft(params, state, wide)
        count = jnp.minimum(out.num_draft_tokens, jnp.int32(width - 1))
        log_probs = None if out.log_probs is None else out.log_probs[:, : width - 1]
        return DraftBlock(out.tokens[:, :width], count, log_probs=log_probs), state

    def ingest(params: ModelParams, state: State, batch: IngestBatch) -> tuple[State, Carry]:
        missing = drafter.min_ingest - batch.next_ids.shape[1]
        return drafter.ingest(params, state, _padded(batch, missing) if missing > 0 else batch)

    return drafter._replace(
        num_draft_tokens=width - 1, depth=None, draft=draft, ingest=ingest, min_ingest=1
    )


def _widened(block: Block, width: int, drafter: Drafter, page_size: int) -> Block:
    """The block that the drafter fills: the same bonus token, and a mask token for each draft."""
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = block.lens[:, None] + column
    is_live = jnp.broadcast_to(block.kv_locs[:, :1] >= page_size, positions.shape)
    kv_locs = kv_locs_at(block.page_table, positions, page_size)
    ids = jnp.where(column == 0, block.token_ids[:, :1], drafter.mask_token_id)
    return block.replace(
        token_ids=ids.astype(block.token_ids.dtype),
        positions=positions,
        kv_locs=to_null_page(kv_locs, is_live, page_size),
    )


def _padded(batch: IngestBatch, missing: int) -> IngestBatch:
    """As many columns more, which are not valid and lie in the null page."""

    def more(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)))

    block = batch.block
    last = block.positions[:, -1:]
    beyond = last + jnp.arange(1, missing + 1, dtype=jnp.int32)[None, :]
    return batch.replace(
        block=block.replace(
            token_ids=more(block.token_ids),
            positions=jnp.concatenate([block.positions, beyond], axis=1),
            kv_locs=more(block.kv_locs),
        ),
        next_ids=more(batch.next_ids),
        features=more(batch.features),
    )
