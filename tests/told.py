"""A drafter that is told each request's text, so that drafts are right under any settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import DraftBlock, DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import init_state
from jaxspec.future_map import token_dtype
from jaxspec.mode import Mode
from jaxspec.request import Request, RequestOutput
from tests.fakes import EOS, VOCAB, LetterTokenizer, build_table_target, letter_grammars, make_table
from tests.harness import (
    CONTEXT,
    SCRIPT,
    expected,
    make_geometry,
    script_of,
    scripted_accept_lengths,
    shared_steps,
)


class ToldParams(NamedTuple):
    """texts: i32[V, C] prompt and output by the prompt's first token. accepts: as the script's."""

    texts: jax.Array
    accepts: jax.Array


@functools.cache
def build_told_drafter(num_draft_tokens: int) -> Drafter:
    """Drafts what it was told for as many tokens as the script says, then wrongly."""

    def draft(params: ModelParams, state: tuple, context: DraftContext):
        told: ToldParams = params.drafter
        positions = context.block.positions
        text = told.texts[state[0][context.rows]]
        ids = jnp.take_along_axis(text, jnp.minimum(positions, text.shape[1] - 1), axis=1)
        column = jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None, :]
        right = column <= told.accepts[positions[:, :1]]
        ids = jnp.where(right, ids, (ids + 1) % VOCAB)
        ids = jnp.where(column == 0, context.block.token_ids.astype(jnp.int32), ids)
        count = jnp.full_like(context.rows, num_draft_tokens)
        return DraftBlock(ids.astype(token_dtype()), count), state

    def ingest(params: ModelParams, state: tuple, batch: IngestBatch):
        begins = (batch.block.positions[:, 0] == 0) & (batch.rows != 0)
        rows = jnp.where(begins, batch.rows, state[0].shape[0])
        first = batch.block.token_ids[:, 0].astype(jnp.int32)
        return (state[0].at[rows].set(first, mode="drop"),), ()

    return Drafter(
        name="told",
        num_draft_tokens=num_draft_tokens,
        feature_layers=(),
        mask_token_id=0,
        init_state=lambda num_pages, num_slots, max_len: (jnp.zeros(num_slots + 1, jnp.int32),),
        init_carry=lambda num_slots: (),
        draft=draft,
        ingest=ingest,
    )


def check_told_lengths(outputs: Mapping[str, RequestOutput], asked: Iterable[Request], accepts):
    """The accept lengths are those of the script, but for the cut one at the end.

    What lies behind the end nobody told the drafter.
    """
    for each in asked:
        lengths = outputs[each.request_id].metrics.accept_lengths
        want = scripted_accept_lengths(each, accepts)
        assert len(lengths) == len(want), each
        assert lengths[:-1] == want[:-1], each


def told_engine(
    *asked: Request,
    accepts=SCRIPT,
    overlap=True,
    make_detokenizer=None,
    prefix_caching=True,
    **changes,
):
    """An engine whose drafter knows these requests, each of another first prompt token."""
    texts = np.zeros((VOCAB, 2 * CONTEXT), np.int32)
    for each in asked:
        text = [*each.prompt_token_ids, *expected(each)]
        assert not texts[text[0]].any(), "two prompts begin alike"
        texts[text[0], : len(text)] = text
    geometry = make_geometry(**changes)
    target, drafter = build_table_target(geometry.page_size), build_told_drafter(7)
    told = ToldParams(jnp.asarray(texts), jnp.asarray(script_of(accepts)))
    return Engine(
        geometry,
        ModelParams(jnp.asarray(make_table(0)), told),
        init_state(geometry, target, drafter),
        {mode: shared_steps(geometry, target, drafter, mode=mode, split=False) for mode in Mode},
        eos_token_ids=(EOS,),
        make_detokenizer=make_detokenizer,
        tokenizer=LetterTokenizer(),
        grammars=letter_grammars(),
        overlap=overlap,
        prefix_lookahead=drafter.kv_lookahead if prefix_caching else None,
    )
