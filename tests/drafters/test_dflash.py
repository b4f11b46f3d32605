"""The DFlash drafter against the original's module, the paper's formulation, and its own limits."""

from __future__ import annotations

import dataclasses
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.drafters.base import DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.drafters.dflash import build_dflash
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Block, Kernels, Target
from tests.drafters.dense_dflash import dense_hidden
from tests.models.checkpoints import DFLASH, dflash_params, load
from tests.models.paging import block_at, page_tables, rows_of

PAGE_SIZE = 4
MASK = DFLASH.mask_token_id
FILE = load("dflash")
FEATURES, EMBED = FILE["features"], FILE["embed"]


# Its head is the identity, so that the drafter's last hidden states arrive as logits.
IDENTITY = Target(
    embed=lambda params, token_ids: params[token_ids],
    forward=None,
    logits=lambda params, hidden: hidden,
    init_kv=None,
)


@cache
def build(config=DFLASH, draft_window=None, block_size=6) -> Drafter:
    return build_dflash(
        config,
        IDENTITY,
        block_size=block_size,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        kernels=Kernels(),
        draft_window=draft_window,
    )


def params_of(num_layers: int = 3) -> ModelParams:
    return ModelParams(target=jnp.asarray(EMBED), drafter=dflash_params(FILE, num_layers))


@cache
def programs(drafter: Drafter):
    """(draft, ingest) jitted; draft returns (hidden of slots 1..K, DraftBlock, state)."""

    def draft(params: ModelParams, state, block: Block):
        seen = []

        def sample(logits, positions):
            chex.assert_equal_shape_prefix([logits, positions], 2)
            seen.append(logits)
            return lax.argmax(logits, 2, block.token_ids.dtype) + positions.astype(
                block.token_ids.dtype
            )

        rows = jnp.ones_like(block.lens)
        out, state = drafter.draft(params, state, DraftContext(rows, block, (), sample))
        return seen[0], out, state

    return jax.jit(draft), jax.jit(drafter.ingest)


def draft_at(drafter: Drafter, params, state, bonus, lens, table):
    ids = np.full((len(lens), drafter.block_size), MASK)
    ids[:, 0] = bonus
    return programs(drafter)[0](params, state, block_at(ids, lens, table, PAGE_SIZE))


def ingest_at(params, state, features, lens, num_valid, table):
    """features [B, 6, F * E], of which the first num_valid[b] of row b are committed."""
    block = block_at(np.zeros(features.shape[:2]), lens, table, PAGE_SIZE)
    valid = np.arange(features.shape[1]) < np.asarray(num_valid)[:, None]
    batch = IngestBatch(
        rows=jnp.ones_like(block.lens),
        block=block.replace(kv_locs=jnp.where(valid, block.kv_locs, block.kv_locs % PAGE_SIZE)),
        next_ids=block.token_ids,
        features=jnp.asarray(features),
        num_valid=jnp.asarray(num_valid, jnp.int32),
        is_first=jnp.zeros(len(lens), bool),
    )
    # Windows, causality and limits are the draft's business: one program ingests for all configs.
    state, carry = programs(build())[1](params, state, batch)
    assert carry == ()
    return state


def context_of(params, length: int, table, start: int = 0, state=None):
    """The drafter's KV once the first `length` rows of FEATURES are committed, 6 at a time."""
    state = build().init_state(17, 2, 32) if state is None else state
    while start < length:
        count = min(6, length - start)
        features = np.zeros((1, 6, FEATURES.shape[1]), np.float32)
        features[0, :count] = FEATURES[start : start + count]
        state = ingest_at(params, state, features, [start], [count], table)
        start += count
    return state


def dense_drafts(length: int, bonus: int, config=DFLASH, num_layers=3, draft_window=None):
    ids = [bonus] + [MASK] * 5
    drafter = dflash_params(FILE, num_layers)
    return dense_hidden(drafter, config, FEATURES[:length], EMBED[ids], draft_window)[1:]


@pytest.mark.parametrize(
    ("case", "causal"),
    [
        ("by_layer", (True, False, True)),
        ("never_causal", (False, False, False)),
        ("causal", (True, True, True)),
    ],
)
def test_drafts_after_each_commit_equal_the_original_module(case, causal):
    """PyPI dflash 0.1.0 with its own cropped cache; windows of 7, rope and eps of the drafter's."""
    config = dataclasses.replace(DFLASH, layer_causal=causal)
    drafter, params, table = build(config), params_of(), page_tables(1, 8)
    state, length = drafter.init_state(17, 2, 32), 0
    for count, bonus, expected in zip(
        FILE["commits"], FILE["bonus"], FILE[f"hidden_{case}"], strict=True
    ):
        state = context_of(params, length + count, table, start=length, state=state)
        length += count
        hidden, out, state = draft_at(drafter, params, state, bonus, [length], table)

        assert np.abs(hidden[0] - expected[1:]).max() < 5e-6 * np.abs(expected).max()
        assert out.num_draft_tokens.tolist() == [5]
        positions = np.arange(length + 1, length + 6)
        np.testing.assert_array_equal(out.tokens[0, 1:], hidden[0].argmax(-1) + positions)
        assert out.tokens[0, 0] == bonus


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_materialised_context_equals_concatenation_after_each_layer(num_layers):
    config = dataclasses.replace(
        DFLASH,
        num_layers=num_layers,
        layer_windows=DFLASH.layer_windows[:num_layers],
        layer_causal=DFLASH.layer_causal[:num_layers],
    )
    table = page_tables(1, 8)
    state = context_of(params_of(), 17, table)[:num_layers]
    hidden, _, _ = draft_at(build(config), params_of(num_layers), state, 3, [17], table)
    expected = dense_drafts(17, 3, config, num_layers)
    np.testing.assert_allclose(hidden[0], expected, rtol=0, atol=1e-5)


def test_prompts_ingested_in_one_call_equal_tile_after_tile():
    """Rows are tiles of 6: two of one prompt, the last one short."""
    params, tables = params_of(), page_tables(1, 8)
    expected = context_of(params, 9, tables)
    tiles = np.zeros((2, 6, FEATURES.shape[1]), np.float32)
    tiles[0], tiles[1, :3] = FEATURES[:6], FEATURES[6:9]
    state = build().init_state(17, 2, 32)
    state = ingest_at(params, state, tiles, [0, 6], [6, 3], tables[[0, 0]])
    for pages, expected_pages in zip(state, expected, strict=True):
        rows = rows_of(expected_pages, tables[0], 9)
        np.testing.assert_allclose(rows_of(pages, tables[0], 9), rows, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(pages[tables[0, 3:]], 0)


def test_rejected_slots_change_nothing_even_when_poisoned():
    """F20: rows accept 1 and 6 in one step; features and scratch KV of the rest become NaN."""
    drafter, params, tables = build(), params_of(), page_tables(2, 8)

    def second_drafts(poison: float):
        state = drafter.init_state(17, 2, 32)
        prompts = np.stack([FEATURES[:6], FEATURES[3:9]])
        state = ingest_at(params, state, prompts, [0, 0], [5, 6], tables)
        _, _, state = draft_at(drafter, params, state, [7, 8], [5, 6], tables)
        verified = np.stack([FEATURES[5:11], FEATURES[9:15]])
        verified[0, 1:] += poison
        state = tuple(
            pages.at[tables[0, 1], :, :, 2:].add(poison).at[tables[0, 2], :, :, :3].add(poison)
            for pages in state
        )
        state = ingest_at(params, state, verified, [5, 6], [1, 6], tables)
        committed = [rows_of(p, tables[b], n) for p in state for b, n in ((0, 6), (1, 12))]
        hidden, out, _ = draft_at(drafter, params, state, [9, 10], [6, 12], tables)
        return hidden, out.tokens, committed

    clean, poisoned = second_drafts(0.0), second_drafts(np.nan)

    chex.assert_trees_all_equal(clean, poisoned)
    chex.assert_tree_all_finite(clean)
    own = (
        dense_drafts(6, 9),
        dense_hidden(params.drafter, DFLASH, FEATURES[3:15], EMBED[[10] + [MASK] * 5])[1:],
    )
    np.testing.assert_allclose(clean[0], np.stack(own), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [6, 8, 100], ids=["one block", "8", "longer than all"])
def test_a_draft_window_equals_masked_full_attention(window):
    """F25: page size 4, lengths 6..14 one by one."""
    config = dataclasses.replace(
        DFLASH, num_layers=2, layer_windows=(None, 7), layer_causal=(False, True)
    )
    drafter, params, table = build(config, window), params_of(2), page_tables(1, 8)
    state, everything = context_of(params_of(), 5, table), params_of()
    for length in range(6, 15):
        state = context_of(everything, length, table, start=length - 1, state=state)
        hidden, _, scratched = draft_at(drafter, params, state[:2], 3, [length], table)
        state = (*scratched, state[2])
        expected = dense_drafts(length, 3, config, num_layers=2, draft_window=window)
        np.testing.assert_allclose(hidden[0], expected, rtol=0, atol=1e-5)


def test_a_row_whose_block_runs_past_the_drafters_positions_stops_drafting():
    """F8: positions 0..15 exist; a block of 6 fits behind 10 tokens, not behind 11."""
    config = dataclasses.replace(
        DFLASH, num_layers=1, layer_windows=(7,), layer_causal=(True,), max_position_embeddings=16
    )
    drafter = build(config)
    state = drafter.init_state(33, 4, 32)
    table = page_tables(4, 8)
    _, out, _ = draft_at(drafter, params_of(1), state, [1, 2, 3, 4], [0, 10, 11, 20], table)
    assert out.num_draft_tokens.tolist() == [5, 5, 0, 0]


def test_a_draft_window_smaller_than_the_block_is_refused():
    with pytest.raises(ValueError, match=r"draft window 5 does not hold a block of 6.*at least 6"):
        build(draft_window=5)


@pytest.mark.parametrize("block_size", [1, 7])
def test_a_block_size_the_drafter_was_not_trained_for_is_refused(block_size):
    with pytest.raises(ValueError, match=rf"block size {block_size} is not possible.*use 2 to 6"):
        build(block_size=block_size)


def test_tokens_have_the_token_dtype_and_all_else_stays_narrow(x64):
    drafter, params = build(), params_of()
    state = drafter.init_state(9, 1, 32)
    block = block_at([[1] + [MASK] * 5], [0], page_tables(1, 8), PAGE_SIZE)
    block = block.replace(token_ids=block.token_ids.astype(token_dtype()))

    hidden, out, state = jax.eval_shape(programs(drafter)[0], params, state, block)

    chex.assert_type([hidden, *state], jnp.float32)
    chex.assert_type([out.tokens, out.num_draft_tokens], [token_dtype(), jnp.int32])
    chex.assert_shape([out.tokens, out.num_draft_tokens], [(1, 6), (1,)])


def test_equal_arguments_build_the_same_drafter():
    assert build.__wrapped__() is build.__wrapped__()
