"""The prefill step: tiles of prompts through the target, the drafter fed, first tokens chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv_pages import kv_locs_at, to_null_page
from jaxspec.config import Geometry
from jaxspec.drafters.base import DraftBlock, Drafter, IngestBatch, ModelParams
from jaxspec.engine.choose import choose_tokens
from jaxspec.engine.decode_step import editing_of, settle
from jaxspec.engine.state import EngineState, PrefillBatch
from jaxspec.future_map import RelayPayload, token_dtype
from jaxspec.logit_edits import preceding_in_chain
from jaxspec.logprobs import pack_logprobs
from jaxspec.mode import Mode
from jaxspec.models.base import Block, Target
from jaxspec.verify import verify

PrefillStep = Callable[[ModelParams, EngineState, jax.Array], tuple[EngineState, jax.Array]]


@functools.lru_cache(maxsize=64)
def build_prefill_step(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode
) -> PrefillStep:
    """Builds (params, DONATED state, packed i32[B, W]) -> (state, output i32[B, 1 + 4]).

    A tile's row of output counts only where the prompt ends in that tile: its first token, cut
    at stop ids and limits like any other. A chunk of a longer prompt has no final tile. In modes
    with log-probabilities `pack_logprobs` of that token follows, and then, for prompts, of the
    token behind each of the tile's, flat.
    """

    def prefill_step(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        batch = PrefillBatch.unpack(packed, geometry, mode)
        column = jnp.arange(geometry.prefill_tile, dtype=jnp.int32)[None, :]
        valid = column < batch.num_valid[:, None]
        positions = batch.lens[:, None] + column
        kv_locs = kv_locs_at(batch.page_table, positions, geometry.page_size)
        block = Block(
            token_ids=batch.token_ids,
            positions=positions,
            kv_locs=to_null_page(kv_locs, valid, geometry.page_size),
            page_table=batch.page_table,
            lens=batch.lens,
        )
        with jax.named_scope("target"):
            out = target.forward(params.target, state.kv, block)

        last = (batch.num_valid - 1)[:, None]
        hidden = jnp.take_along_axis(out.hidden, last[:, :, None], axis=1)
        last_positions = batch.lens[:, None] + last
        last_ids = jnp.take_along_axis(batch.token_ids, last, axis=1)
        logits = target.logits(params.target, hidden)
        editing = editing_of(state, batch.rows, batch.limits, mode)
        if editing is not None:
            before = preceding_in_chain(last_ids, editing.rows.tail)
            editing = editing._replace(before=before, allowed=batch.allowed)
        predicted, finite = choose_tokens(
            logits,
            last_positions + 1,
            batch.limits.sampling,
            editing,
            mode=mode,
            kernels=geometry.kernels,
        )
        accepted, _ = verify(
            DraftBlock(last_ids, jnp.zeros_like(batch.rows)),
            predicted,
            last_positions[:, 0],
            batch.limits.bounds,
            vocab_size=geometry.vocab_size,
            kernels=geometry.kernels,
        )

        # Only a prompt's final tile starts its row of the relay; the others stand in as padding.
        rows = jnp.where(batch.is_final, batch.rows, 0)
        relay = state.future_map.release(rows).publish(rows, accepted.new_lens)
        following = jnp.where(batch.is_final, accepted.bonus, batch.next_ids.astype(token_dtype()))
        next_ids = jnp.roll(batch.token_ids, -1, axis=1)
        next_ids = jnp.where(column == last, following[:, None], next_ids)
        ingested = IngestBatch(
            rows=batch.rows,
            block=block,
            next_ids=next_ids,
            features=out.features,
            num_valid=jnp.where(batch.rows == 0, 0, batch.num_valid),
            is_first=batch.is_first,
        )
        with jax.named_scope("ingest"):
            drafter_state, carry = drafter.ingest(params, state.drafter_state, ingested)
        relay = relay.stash(rows, RelayPayload(accepted.bonus, carry))
        limits = state.limits.put(rows, batch.limits)
        settled = settle(relay, limits, rows, accepted, jnp.zeros_like(rows), finite)
        relay, limits, output = settled
        told = []
        if mode.logprobs:
            told.append(pack_logprobs(logits, predicted)[:, 0])
        if mode is Mode.PROMPT_LOGPROBS:
            # A tile at a time: logits of all tokens of all tiles would not fit.
            def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
                hidden, ids = tile
                return pack_logprobs(target.logits(params.target, hidden[None]), ids[None])[0]

            of_prompt = lax.map(of_tile, (out.hidden, next_ids))
            told.append(of_prompt.reshape(len(output), -1))
        output = jnp.concatenate([output, *told], axis=1)
        after = EngineState(relay, out.kv, drafter_state, limits)
        if mode.edits:
            appended = state.edits.advance(rows, accepted.tokens, accepted.num_committed)
            after = after.replace(edits=appended)
        return after, output

    return jax.jit(prefill_step, donate_argnames="state")
