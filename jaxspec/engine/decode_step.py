"""The decode step: one token's journey from `FutureMap` row to `FutureMap` row, a line a stage.

Plain decoding is the drafter `none` through the same step: a block of one token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv_pages import to_null_page
from jaxspec.config import Geometry
from jaxspec.drafters.base import DraftBlock, DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.engine.choose import (
    choice_of,
    choose_by_rejection,
    choose_tokens,
    preceding,
    token_log_probs,
)
from jaxspec.engine.state import DecodeBatch, EngineState, Limits
from jaxspec.engine.tree_step import lay_out, straighten
from jaxspec.future_map import NON_FINITE_LOGITS, FutureMap, RelayPayload
from jaxspec.logit_edits import Editing
from jaxspec.logprobs import logprob_width, pack_logprobs
from jaxspec.mode import Mode
from jaxspec.models.base import Block, Target
from jaxspec.sampling import greedy_tokens
from jaxspec.verify import Accepted, verify

DecodeStep = Callable[[ModelParams, EngineState, jax.Array], tuple[EngineState, jax.Array]]
OnPublish = Callable[[jax.Array], None]


@flax.struct.dataclass
class Drafted:
    """A block of drafts on its way to the target."""

    rows: jax.Array  # i32[B]
    block: Block
    draft: DraftBlock
    errors: jax.Array  # i32[B] of the resolve


@flax.struct.dataclass
class TargetLogits:
    """What the target says of a block."""

    logits: jax.Array  # f32[B, N, V]
    features: jax.Array  # [B, N, F * E]


@flax.struct.dataclass
class Pending:
    """What verification leaves for the drafter to ingest and the relay to stash."""

    ingest: IngestBatch
    bonus_tokens: jax.Array  # token_dtype[B]
    new_seq_lens: jax.Array  # i32[B] as published


class Stages(NamedTuple):
    """A decode step as plain functions, in order; see `build_stages`."""

    draft: Callable[[ModelParams, EngineState, jax.Array], tuple[EngineState, Drafted]]
    target: Callable[[ModelParams, EngineState, Drafted], tuple[EngineState, TargetLogits]]
    accept: Callable[..., tuple[EngineState, Pending, jax.Array]]
    ingest: Callable[[ModelParams, EngineState, Pending], EngineState]


def build_stages(
    geometry: Geometry,
    target: Target,
    drafter: Drafter,
    *,
    mode: Mode,
    on_publish: OnPublish | None = None,
):
    """The two halves of a step: (verify and publish, ingest and stash), as plain functions.

    on_publish: called while tracing with the published lengths i32[B], between the halves.
    """
    stages = build_fine_stages(geometry, target, drafter, mode=mode, on_publish=on_publish)

    def verify_half(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, Pending, jax.Array]:
        state, drafted = stages.draft(params, state, packed)
        state, judged = stages.target(params, state, drafted)
        return stages.accept(state, drafted, judged)

    return verify_half, stages.ingest


def build_fine_stages(
    geometry: Geometry,
    target: Target,
    drafter: Drafter,
    *,
    mode: Mode,
    on_publish: OnPublish | None = None,
) -> Stages:
    """Builds (draft, target forward, accept and publish, ingest and stash)."""
    by_rejection = geometry.accept_rule == "rejection" and mode is not Mode.GREEDY

    def draft_stage(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, Drafted]:
        batch = DecodeBatch.unpack(packed)
        with jax.named_scope("resolve"):
            relay, resolved, prepared = state.future_map.resolve_block(
                batch.rows,
                batch.page_table,
                vocab_size=geometry.vocab_size,
                mask_token_id=drafter.mask_token_id,
                block_size=drafter.block_size,
                page_size=geometry.page_size,
                poison=geometry.poison,
                implementation=geometry.kernels.resolve_prepare,
            )
        limits = state.limits.of(batch.rows)
        # A frozen row's pages may have a new owner: it writes to the null page.
        live = jnp.broadcast_to(~limits.frozen[:, None], prepared.kv_locs.shape)
        block = Block(
            token_ids=prepared.block_ids,
            positions=prepared.positions,
            kv_locs=to_null_page(prepared.kv_locs, live, geometry.page_size),
            page_table=batch.page_table,
            lens=resolved.lens,
        )
        drafting = mode if geometry.draft_noise == "keyed" else Mode.GREEDY
        chosen_by = {
            "sampling": limits.sampling,
            "editing": editing_of(state, batch.rows, limits, drafting),
            "mode": drafting,
            "kernels": geometry.kernels,
        }

        def scores(logits: jax.Array, positions: jax.Array) -> jax.Array:
            return choice_of(lambda scores: scores, logits, positions, **chosen_by)

        def sample(logits: jax.Array, positions: jax.Array) -> jax.Array:
            return choice_of(greedy_tokens, logits, positions, **chosen_by)

        def log_probs(logits: jax.Array, positions: jax.Array) -> jax.Array:
            return token_log_probs(logits, positions, **chosen_by)

        with jax.named_scope("draft"):
            context = DraftContext(
                batch.rows,
                block,
                resolved.carry,
                sample,
                drafting is Mode.GREEDY,
                scores,
                log_probs if by_rejection and drafting is mode else None,
            )
            draft, drafter_state = drafter.draft(params, state.drafter_state, context)
            block = lay_out(draft, block, drafter.depth)
        state = state.replace(future_map=relay, drafter_state=drafter_state)
        return state, Drafted(batch.rows, block, draft, resolved.errors)

    def target_stage(
        params: ModelParams, state: EngineState, drafted: Drafted
    ) -> tuple[EngineState, TargetLogits]:
        with jax.named_scope("target"):
            out = target.forward(params.target, state.kv, drafted.block)
        with jax.named_scope("verify"):
            logits = target.logits(params.target, out.hidden)
        return state.replace(kv=out.kv), TargetLogits(logits, out.features)

    def accept_stage(
        state: EngineState, drafted: Drafted, judged: TargetLogits, allowed: jax.Array | None = None
    ) -> tuple[EngineState, Pending, jax.Array]:
        rows, block, draft, errors = drafted.rows, drafted.block, drafted.draft, drafted.errors
        limits = state.limits.of(rows)
        logits, positions = judged.logits, block.positions + 1
        with jax.named_scope("verify"):
            editing = editing_of(state, rows, limits, mode)
            if editing is not None:
                before = preceding(draft, editing.rows.tail, drafter.depth)
                editing = editing._replace(before=before, allowed=allowed)
            chosen_by = {"mode": mode, "kernels": geometry.kernels}
            predicted, finite = choose_tokens(
                logits, positions, limits.sampling, editing, **chosen_by
            )
            if by_rejection:
                p = token_log_probs(logits, positions, limits.sampling, editing, **chosen_by)
                predicted = choose_by_rejection(p, draft, positions, limits.sampling, predicted)
            accepted, path = verify(
                draft,
                predicted,
                block.lens,
                limits.bounds,
                vocab_size=geometry.vocab_size,
                kernels=geometry.kernels,
                force_accept=geometry.force_accept,
            )
        relay = state.future_map.publish(rows, accepted.new_lens)
        if on_publish is not None:
            on_publish(accepted.new_lens)

        column = jnp.arange(drafter.max_accept_length, dtype=jnp.int32)[None, :]
        committed = column < accepted.num_committed[:, None]
        places = block.kv_locs[:, : drafter.max_accept_length]
        places = to_null_page(places, committed, geometry.page_size)
        block, kv, features, finite = straighten(
            path,
            places,
            block,
            state.kv,
            judged.features,
            finite,
            kernels=geometry.kernels,
        )
        pending = Pending(
            ingest=IngestBatch(
                rows=rows,
                block=block,
                next_ids=accepted.tokens[:, : drafter.max_accept_length],
                features=features,
                num_valid=accepted.num_committed,
                is_first=jnp.zeros_like(limits.frozen),
            ),
            bonus_tokens=accepted.bonus,
            new_seq_lens=accepted.new_lens,
        )
        relay, slot_limits, output = settle(relay, state.limits, rows, accepted, errors, finite)
        if mode.logprobs:
            told = pack_logprobs(logits, predicted)
            if path is not None:
                told = jnp.take_along_axis(told, path[:, : column.shape[1], None], axis=1)
            output = jnp.concatenate([output, told.reshape(len(output), -1)], axis=1)
        after = state.replace(future_map=relay, kv=kv, limits=slot_limits)
        if mode.edits:
            appended = state.edits.advance(rows, accepted.tokens, accepted.num_committed)
            after = after.replace(edits=appended)
        return after, pending, output

    def ingest_stage(params: ModelParams, state: EngineState, pending: Pending) -> EngineState:
        with jax.named_scope("ingest"):
            drafter_state, carry = drafter.ingest(params, state.drafter_state, pending.ingest)
        payload = RelayPayload(pending.bonus_tokens, carry)
        relay = state.future_map.stash(pending.ingest.rows, payload)
        return state.replace(future_map=relay, drafter_state=drafter_state)

    return Stages(draft_stage, target_stage, accept_stage, ingest_stage)


def editing_of(state: EngineState, rows: jax.Array, limits: Limits, mode: Mode) -> Editing | None:
    """What changes the logits of a batch's rows, before anything is known of its tokens."""
    return Editing(state.edits.of(rows), limits.stop_ids) if mode.edits else None


@functools.lru_cache(maxsize=64)
def build_decode_step(
    geometry: Geometry,
    target: Target,
    drafter: Drafter,
    *,
    mode: Mode,
    on_publish: OnPublish | None = None,
) -> DecodeStep:
    """Builds (params, DONATED state, packed i32[B, 1 + M]) -> (state, output i32[B, N + 4]).

    In modes with log-probabilities `pack_logprobs` of each position of a path follows, flat.
    """
    verify_half, ingest_half = build_stages(
        geometry, target, drafter, mode=mode, on_publish=on_publish
    )

    def decode_step(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        state, pending, output = verify_half(params, state, packed)
        return ingest_half(params, state, pending), output

    return jax.jit(decode_step, donate_argnames="state")


@functools.lru_cache(maxsize=64)
def build_split_decode_step(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode
) -> DecodeStep:
    """`build_decode_step` as two programs, so that the output is ready before the ingest runs."""
    verify_half, ingest_half = build_stages(geometry, target, drafter, mode=mode)
    first = jax.jit(verify_half, donate_argnames="state")
    second = jax.jit(ingest_half, donate_argnames="state")

    def decode_step(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        state, pending, output = first(params, state, packed)
        return second(params, state, pending), output

    return decode_step


@functools.lru_cache(maxsize=64)
def build_decode_loop(
    geometry: Geometry, target: Target, drafter: Drafter, *, num_steps: int, mode: Mode
) -> DecodeStep:
    """Builds `num_steps` decode steps in one program: output i32[num_steps, B, N + 4].

    `geometry.loop_unroll` steps are a turn of its loop. Ends before a turn once every row of the
    batch is frozen; steps not run report nothing committed.
    """
    unroll = geometry.loop_unroll
    num_turns = num_steps // unroll
    verify_half, ingest_half = build_stages(geometry, target, drafter, mode=mode)

    def decode_loop(
        params: ModelParams, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        rows = DecodeBatch.unpack(packed).rows

        def steps_of_a_turn(state: EngineState) -> tuple[EngineState, jax.Array]:
            outputs = []
            for _ in range(unroll):
                state, pending, output = verify_half(params, state, packed)
                state = ingest_half(params, state, pending)
                outputs.append(output)
            return state, jnp.stack(outputs)

        if num_turns == 1:
            return steps_of_a_turn(state)

        def some_row_lives(carry) -> jax.Array:
            turn, state, _ = carry
            return (turn < num_turns) & ~jnp.all(state.limits.frozen[rows])

        def one_turn(carry):
            turn, state, outputs = carry
            state, output = steps_of_a_turn(state)
            outputs = lax.dynamic_update_slice_in_dim(outputs, output, turn * unroll, 0)
            return turn + 1, state, outputs

        width = drafter.block_size + 4
        if mode.logprobs:
            width += drafter.max_accept_length * logprob_width(geometry.vocab_size)
        shape = (num_steps, packed.shape[0], width)
        start = (jnp.int32(0), state, jnp.zeros(shape, jnp.int32))
        _, state, outputs = lax.while_loop(some_row_lives, one_turn, start)
        return state, outputs

    return jax.jit(decode_loop, donate_argnames="state")


def settle(
    relay: FutureMap,
    limits: Limits,
    rows: jax.Array,
    accepted: Accepted,
    errors: jax.Array,
    finite: jax.Array,
) -> tuple[FutureMap, Limits, jax.Array]:
    """Freezes the rows that ended or erred, and completes the packed output with error bits.

    errors: i32[B] from the resolve. finite: bool[B, N] of the block's logits; only those that a
    committed token was chosen from count, and the output holds the tokens before the first.
    """
    column = jnp.arange(finite.shape[1], dtype=jnp.int32)[None, :]
    bad = ~finite & (column < accepted.num_committed[:, None])
    broken = jnp.any(bad, axis=1)
    bits = errors | jnp.where(broken, NON_FINITE_LOGITS, 0).astype(jnp.int32)
    bits = jnp.where(rows == 0, 0, bits)
    relay = relay.flag(rows, bits)
    limits = limits.freeze(rows, accepted.finished | (bits != 0))
    told, num_good = accepted.packed, jnp.argmax(bad, axis=1).astype(jnp.int32)[:, None]
    counts = jnp.where(broken[:, None], jnp.minimum(told[:, -4:-2], num_good), told[:, -4:-2])
    output = jnp.concatenate([told[:, :-4], counts, told[:, -2:-1], bits[:, None]], axis=1)
    return relay, limits, output
