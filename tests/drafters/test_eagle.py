"""EAGLE against the originals' modules, against recomputation from scratch, and its own limits."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.eagle import build_eagle
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Kernels
from tests.drafters.dense_eagle import DenseEagle
from tests.drafters.eagle_folders import fixture_of, loaded
from tests.drafters.eagle_rig import (
    BORROWED,
    PAGE_SIZE,
    Run,
    Text,
    batch_of,
    block_of,
    programs,
    relative_error,
    unwritten,
)
from tests.models.paging import page_tables, rows_of

CASES = ["plain", "fc_norm", "speculators", "eagle"]
NUM_DRAFTS = 3
ROUNDING = 1e-5  # float32 against float32, relative to the largest value


@functools.cache
def build(case: str, draft_window=None, **changes) -> Drafter:
    config = dataclasses.replace(loaded(case)[0], **changes)
    return build_eagle(
        config,
        BORROWED,
        block_size=NUM_DRAFTS + 1,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        kernels=Kernels(),
        draft_window=draft_window,
    )


def params_of(case: str) -> ModelParams:
    """EAGLE-1's head is the identity, so that its outputs arrive as logits."""
    params = loaded(case)[1]
    embed = jnp.zeros((97, 32)) if params.embed is None else params.embed
    return ModelParams(target=(embed, jnp.eye(32)), drafter=params)


@pytest.mark.parametrize("case", CASES)
def test_passes_at_every_length_equal_the_original_module(case):
    """SpecForge 0.2.0, speculators 0.9.0 and eagle-llm 1.2.1; 20 lengths side by side, led
    along the text as SpecForge's training is."""
    drafter, params, file = build(case), params_of(case), fixture_of(case)
    own = loaded(case)[1]
    lens = list(range(1, 21))
    table = page_tables(20, 7)
    force, _, ingest = programs(drafter)
    features = np.tile(file["features"], (20, 1, 1))
    next_ids = np.tile(file["token_ids"][1:21], (20, 1))
    batch = batch_of(features, next_ids, [0] * 20, lens, table)
    state, carry = ingest(params, drafter.init_state(141, 20, 24), batch)

    ids = file["token_ids"]
    tokens = np.stack([ids[n + 1 : n + 1 + NUM_DRAFTS] for n in lens])
    block = block_of(drafter, ids[lens], lens, table)
    out, logits, _ = force(params, state, block, carry, jnp.asarray(tokens))

    expected = file.get("logits", file["outputs"])[:NUM_DRAFTS].transpose(1, 0, 2)
    if own.target_ids is not None:
        outside = np.delete(np.arange(97), own.target_ids)
        assert np.isneginf(logits[..., outside]).all()
        logits = logits[..., own.target_ids]
    assert relative_error(logits, expected) < ROUNDING
    assert relative_error(carry.hidden_states, file["outputs"][0]) < ROUNDING
    np.testing.assert_array_equal(out.tokens[:, 1:], tokens)
    np.testing.assert_array_equal(out.tokens[:, 0], ids[lens])
    assert out.num_draft_tokens.tolist() == [NUM_DRAFTS] * 20
    best = expected[:, 0].argmax(-1)
    probabilities = np.exp(expected[:, 0] - expected[:, 0].max(-1, keepdims=True))
    highest = 1 / probabilities.sum(-1)
    np.testing.assert_allclose(carry.topk_p[:, 0], highest, rtol=1e-4)
    best = best if own.target_ids is None else np.asarray(own.target_ids)[best]
    np.testing.assert_array_equal(carry.topk_index[:, 0], best)


def run_of(case: str, drafter: Drafter) -> Run:
    return Run(drafter, params_of(case), feature_width(case))


def feature_width(case: str) -> int:
    return fixture_of(case)["features"].shape[1]


@pytest.mark.parametrize(
    ("case", "window", "changes"),
    [("plain", None, {}), ("plain", 6, {"norm_output": True}), ("eagle", None, {})],
    ids=["eagle3", "eagle3, window 6, normed output fed back", "eagle"],
)
def test_every_chain_of_a_run_equals_recomputation_from_scratch(case, window, changes):
    """F20, F25: rows accept 0 to 3 drafts in one step; what was rejected is NaN; page size 4."""
    config, own = loaded(case)
    run = run_of(case, build(case, window, **changes))
    embed, head = params_of(case).target
    dense = DenseEagle(dataclasses.replace(config, window=window, **changes), own, embed, head)
    for counts in [(3, 4, 1), (1, 2, 4), (1, 4, 3), (4, 1, 2), (2, 3, 1), (4, 2, 1), (1, 1, 4)]:
        run.commit(*counts)
        tokens = run.draft()
        for row in range(3):
            drafts, outputs = run.from_scratch(row, dense)
            hidden = run.carry.hidden_states[row]
            assert relative_error(hidden, outputs[0]) < ROUNDING
            assert tokens[row].tolist() == drafts


def test_the_tail_of_a_tile_reads_the_token_that_the_next_tile_begins_with():
    """A prompt of 11 in tiles of 4, all at once and in two dispatches, equals one piece."""
    config, own = loaded("plain")
    text, table = Text(7, feature_width("plain")), page_tables(1, 10)[[0, 0, 0]]
    drafter, params = build("plain"), params_of("plain")
    ingest = programs(drafter)[2]
    tiles = [text.committed(start, count, 4) for start, count in ((0, 4), (4, 4), (8, 3))]
    features, next_ids = (np.stack(part) for part in zip(*tiles, strict=True))
    whole = DenseEagle(config, own).chain(*text.known(11), 1)[1][0]

    def last_output(*dispatches):
        state = unwritten(drafter)
        for counts in dispatches:
            batch = batch_of(features, next_ids, [0, 4, 8], counts, table)
            state, carry = ingest(params, state, batch)
        return carry.hidden_states[2]

    assert relative_error(last_output([4, 4, 3]), whole) < ROUNDING
    assert relative_error(last_output([4, 4, 0], [0, 0, 3]), whole) < ROUNDING


def test_a_row_is_made_from_the_token_after_it():
    """Perturbing the token at j + 1 changes row j and what is drafted behind it, no other row."""
    drafter, params, table = build("plain"), params_of("plain"), page_tables(3, 10)
    features, next_ids = Text(3, feature_width("plain")).committed(0, 4, 4)
    rows = np.tile(next_ids, (3, 1))
    rows[1, 2] += 1
    rows[2, 3] += 1
    batch = batch_of(np.tile(features, (3, 1, 1)), rows, [0, 0, 0], [4, 4, 4], table)
    state, carry = programs(drafter)[2](params, drafter.init_state(31, 3, 32), batch)
    same, middle, last = (rows_of(state, table[row], 4) for row in range(3))
    changed = [np.abs(other - same).max(axis=(0, 1, 3)) > 0 for other in (middle, last)]
    assert changed[0].tolist() == [False, False, True, False]
    assert changed[1].tolist() == [False, False, False, True]
    outputs = carry.hidden_states
    assert np.abs(outputs[1] - outputs[0]).max() > 1e-3
    assert np.abs(outputs[2] - outputs[0]).max() > 1e-3


def test_a_row_without_committed_tokens_writes_to_the_null_page_only():
    run = run_of("plain", build("plain"))
    run.commit(4, 3, 4)
    before = run.state
    run.commit(0, 0, 2)
    owned = run.table[:2].reshape(-1)
    np.testing.assert_array_equal(run.state[owned], before[owned])


def test_a_block_without_room_for_a_draft_is_refused():
    with pytest.raises(ValueError, match="block size 1 leaves no room for a draft; use 2 or more"):
        build_eagle(
            loaded("plain")[0],
            BORROWED,
            block_size=1,
            page_size=4,
            dtype=jnp.float32,
            kernels=Kernels(),
        )


def test_equal_arguments_build_the_same_drafter():
    assert build.__wrapped__("plain") is build.__wrapped__("plain")


def test_programs_are_the_same_with_64_bit_types(x64):
    drafter, params = build("plain"), params_of("plain")
    table = page_tables(2, 10)
    block = block_of(drafter, [1, 2], [3, 4], table)
    block = block.replace(token_ids=jnp.asarray(block.token_ids, token_dtype()))
    state, carry = drafter.init_state(21, 2, 32), drafter.init_carry(1)
    draft = functools.partial(programs(drafter)[1].__wrapped__, params)
    out, _ = jax.eval_shape(draft, state, block, carry)
    batch = batch_of(np.zeros((2, 4, 72), np.float32), np.zeros((2, 4)), [0, 0], [4, 4], table)
    batch = batch.replace(next_ids=batch.next_ids.astype(token_dtype()))
    _, relayed = jax.eval_shape(drafter.ingest, params, state, batch)
    assert out.tokens.dtype == token_dtype()
    chex.assert_trees_all_equal_shapes_and_dtypes(relayed, carry)
