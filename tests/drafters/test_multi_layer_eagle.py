"""Multi-layer EAGLE against a layer's original, against recomputation, and the rows made again."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.boundary import init_boundary, widen
from jaxspec.drafters.multi_layer_eagle import build_multi_layer_eagle
from jaxspec.drafters.multi_layer_eagle_params import MultiLayerEagleParams
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Kernels
from jaxspec.models.layers import LayerParams
from tests.drafters.dense_eagle import DenseMultiLayer
from tests.drafters.eagle_folders import loaded
from tests.drafters.eagle_rig import (
    BORROWED,
    PAGE_SIZE,
    Run,
    Text,
    batch_of,
    block_of,
    programs,
    quick_jit,
    relative_error,
    unwritten,
)
from tests.models.checkpoints import load
from tests.models.paging import page_tables

NUM_LAYERS = 3
ROUNDING = 1e-5
EMBED = load("mtp")["w.embed_tokens.weight"]
HEAD = np.random.default_rng(1).normal(size=EMBED.shape).astype(np.float32)


def config_of(is_chain: bool, **changes):
    return dataclasses.replace(loaded("multi_layer")[0], is_chain=is_chain, **changes)


@functools.cache
def build(is_chain: bool, block_size=NUM_LAYERS + 1, **changes) -> Drafter:
    return build_multi_layer_eagle(
        config_of(is_chain, **changes),
        BORROWED,
        block_size=block_size,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        kernels=Kernels(),
    )


@functools.cache
def params_of() -> ModelParams:
    return ModelParams((jnp.asarray(EMBED), jnp.asarray(HEAD)), loaded("multi_layer")[1])


def dense_of(is_chain: bool) -> DenseMultiLayer:
    return DenseMultiLayer(config_of(is_chain), loaded("multi_layer")[1], EMBED, HEAD)


def test_the_formulation_from_scratch_equals_the_original_module():
    """speculators 0.9.0: three layers over the target's features, at every length."""
    file, dense = load("mtp"), dense_of(is_chain=False)
    for j in range(20):
        ids = file["token_ids"]
        known = file["features"][: j + 1], ids[1 : j + 2]
        _, outputs = dense.chain(*known, NUM_LAYERS, forced=ids[j + 2 :])
        for layer, output in enumerate(outputs):
            norm = np.asarray(dense.params.norms[layer], np.float64)
            normed = output / np.sqrt((output**2).mean() + 1e-5) * norm
            assert relative_error(normed, file["outputs"][layer, j]) < ROUNDING


@pytest.mark.parametrize("is_chain", [False, True], ids=["parallel", "chain"])
def test_every_draft_of_a_run_equals_recomputation_from_scratch(is_chain):
    """Rows made with drafts are made again: no KV of a draft that was not committed survives."""
    run = Run(build(is_chain), params_of(), 32)
    dense = dense_of(is_chain)
    for counts in [(3, 1, 4), (1, 2, 1), (1, 1, 3), (4, 1, 1), (1, 4, 2), (2, 3, 1), (1, 1, 4)]:
        run.commit(*counts)
        tokens = run.draft()
        for row in range(3):
            drafts, outputs = run.from_scratch(row, dense)
            assert relative_error(run.carry.hidden_states[row], np.stack(outputs)) < ROUNDING
            assert tokens[row].tolist() == drafts
            assert run.carry.topk_index[row].tolist() == drafts


@pytest.mark.parametrize("length", [9, 10, 11, 12])
@pytest.mark.parametrize("is_chain", [False, True], ids=["parallel", "chain"])
def test_prompts_in_tiles_equal_one_piece(is_chain, length):
    """Tiles of 4, the last with 1 to 4 rows, in one, two and three dispatches, then a step more."""
    drafter, params, text = build(is_chain), params_of(), Text(7, 32)
    table, ingest = page_tables(1, 10)[[0, 0, 0]], programs(drafter)[2]
    last = length - 8
    tiles = [text.committed(start, count, 4) for start, count in ((0, 4), (4, 4), (8, last))]
    features, next_ids = (np.stack(part) for part in zip(*tiles, strict=True))
    dense = dense_of(is_chain)
    after_prompt = np.stack(dense.chain(*text.known(length), NUM_LAYERS)[1])
    after_step = np.stack(dense.chain(*text.known(length + 2), NUM_LAYERS)[1])
    more = [np.tile(part, (3, 1, 1)[: part.ndim + 1]) for part in text.committed(length, 2, 4)]
    for dispatches in ([(4, 4, last)], [(4, 4, 0), (0, 0, last)], [(4, 0, 0), (0, 4, last)]):
        state = unwritten(drafter)
        for counts in dispatches:
            rows = [int(count > 0) for count in counts]
            batch = batch_of(features, next_ids, [0, 4, 8], counts, table, rows=rows)
            state, carry = ingest(params, state, batch)
        assert relative_error(carry.hidden_states[2], after_prompt) < ROUNDING
        batch = batch_of(*more, [length] * 3, [2, 0, 0], table, rows=[1, 0, 0])
        _, carry = ingest(params, state, batch)
        assert relative_error(carry.hidden_states[0], after_step) < ROUNDING


def test_a_sampled_batch_draws_each_draft_from_its_layer():
    run = Run(build(True), params_of(), 32)
    run.commit(4, 2, 3)
    block = block_of(run.drafter, [1, 2, 3], run.lens, run.table)
    forced = np.arange(9).reshape(3, 3)
    draft = programs(run.drafter)[0]
    out, logits, _ = draft(params_of(), run.state, block, run.carry, jnp.asarray(forced))
    np.testing.assert_array_equal(out.tokens, [[1, 0, 1, 2], [2, 3, 4, 5], [3, 6, 7, 8]])
    np.testing.assert_array_equal(logits.argmax(-1), run.carry.topk_index)
    highest = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, axis=-1))
    np.testing.assert_allclose(highest, run.carry.topk_p, rtol=1e-5)


def test_every_row_of_a_prompt_has_one_tile_that_writes_it():
    """Two rows kept; tiles 0..3 and 4..6 of one prompt, 0..3 of another; page p holds 4p..4p+3."""
    table = np.array([[1, 2], [1, 2], [3, 4]], np.int32)
    features, next_ids = np.zeros((3, 4, 32)), np.arange(12).reshape(3, 4)
    batch = batch_of(features, next_ids, [0, 4, 0], [4, 3, 4], table, rows=[1, 1, 2])
    program = quick_jit(widen, static_argnames="page_size")
    window, boundary = program(init_boundary(2, 2, 32, jnp.float32), batch, page_size=PAGE_SIZE)
    assert window.num_valid.tolist() == [4, 5, 4]
    assert window.block.lens.tolist() == [0, 2, 0]
    assert window.block.positions[1].tolist() == [2, 3, 4, 5, 6, 7]
    assert window.next_ids[1, :5].tolist() == [2, 3, 4, 5, 6]
    assert window.block.kv_locs.tolist() == [
        [4, 5, 2, 3, 0, 1],  # rows 2 and 3 are the next tile's
        [6, 7, 8, 9, 10, 3],
        [12, 13, 14, 15, 0, 1],
    ]
    assert boundary.next_ids[1:].tolist() == [[5, 6], [10, 11]]
    assert boundary.end[1:].tolist() == [7, 4]


def constant_layers() -> MultiLayerEagleParams:
    """Layer i passes on its normed hidden state plus the unit vector i, and stores i + 1 as V."""
    width, size = 8, NUM_LAYERS
    ones, zeros = np.ones((size, width), np.float32), np.zeros((width, width), np.float32)
    passed = np.concatenate([zeros, np.eye(width, dtype=np.float32)], axis=1)
    tall = zeros.repeat(3, axis=0)
    layer = dict(qkv=tall, o=zeros, gate_up=tall[:16], down=zeros)
    biases = [np.repeat([0, 0, i + 1], width).astype(np.float32) for i in range(size)]
    units = 100 * np.eye(size, width, dtype=np.float32)
    params = MultiLayerEagleParams(
        embed_norms=ones,
        hidden_norms=ones,
        mixes=np.tile(passed, (size, 1, 1)),
        norms=ones,
        input_norms=ones,
        post_norms=ones,
        layers=tuple(
            LayerParams(**layer, qkv_bias=biases[i], o_bias=units[i]) for i in range(size)
        ),
    )
    return jax.tree.map(jnp.asarray, params)


def test_step_i_uses_layer_i_and_reads_step_i_minus_1():
    """F31: three layers of constant weights, each with KV of its own."""
    sizes = dict(hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, qk_norm=False)
    drafter = build(True, attention_bias=True, **sizes)
    params = ModelParams((jnp.zeros((5, 8)), jnp.eye(8)), constant_layers())
    run = Run(drafter, params, 8)
    run.commit(2, 4, 1)
    for row, count in enumerate((2, 4, 1)):
        hidden = run.texts[row].features[count - 1]
        for layer in range(NUM_LAYERS):
            hidden = hidden / np.sqrt((hidden**2).mean() + 1e-5)
            hidden = hidden + 100 * np.eye(NUM_LAYERS, 8)[layer]
            np.testing.assert_allclose(run.carry.hidden_states[row, layer], hidden, rtol=1e-5)
            assert run.carry.topk_index[row, layer] == layer
            values = run.state.kv[layer][run.table[row, 0], 1, 0]
            np.testing.assert_array_equal(values[:count], layer + 1.0)


def test_only_rows_whose_tokens_were_kept_are_made_again():
    """A prompt that goes on behind 8 rows of somebody else's prefix leaves those as they are."""
    drafter, text, table = build(False), Text(5, 32), page_tables(3, 10)
    features, next_ids = text.committed(8, 4, 4)
    batch = batch_of(
        np.tile(features, (3, 1, 1)),
        np.tile(next_ids, (3, 1)),
        [8, 0, 0],
        [4, 0, 0],
        table,
        rows=[2, 0, 0],
    )
    state, _ = programs(drafter)[2](params_of(), unwritten(drafter), batch)
    for pages in state.kv:
        assert np.isnan(pages[table[0, :2]]).all()
        assert np.isfinite(pages[table[0, 2]]).all()
    assert (state.boundary.end[2], state.boundary.count[2]) == (12, 2)
    assert state.boundary.count.tolist() == [0, 0, 2, 0]


def test_a_row_without_committed_tokens_changes_the_null_page_only():
    run = Run(build(True), params_of(), 32)
    run.commit(4, 3, 2)
    before = run.state
    run.commit(0, 0, 2)
    owned = run.table[:2].reshape(-1)
    for pages, old in zip(run.state.kv, before.kv, strict=True):
        np.testing.assert_array_equal(pages[owned], old[owned])
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf[:3], run.state.boundary),
        jax.tree.map(lambda leaf: leaf[:3], before.boundary),
    )


def test_one_draft_uses_the_first_layer_and_keeps_no_rows():
    run = Run(build(True, 2), params_of(), 32)
    for counts in [(2, 1, 2), (1, 2, 1), (2, 1, 1)]:
        run.commit(*counts)
    assert len(run.state.kv) == 1
    assert run.state.boundary.features.size == 0
    for row in range(3):
        assert run.draft()[row].tolist() == run.from_scratch(row, dense_of(True))[0]


@pytest.mark.parametrize("block_size", [1, 5])
def test_a_block_that_the_layers_cannot_fill_is_refused(block_size):
    message = f"block size {block_size} is not possible: the drafter has 3 layers.*use 2 to 4"
    with pytest.raises(ValueError, match=message):
        build(False, block_size)


def test_a_tile_that_cannot_hold_the_rows_to_keep_is_refused():
    batch = batch_of(np.zeros((1, 1, 32)), np.zeros((1, 1)), [0], [1], page_tables(1, 2))
    with pytest.raises(ValueError, match=r"tile of 1 tokens is shorter than the 2 rows that 3"):
        build(False).ingest(params_of(), build(False).init_state(3, 1, 8), batch)


def test_programs_are_the_same_with_64_bit_types(x64):
    drafter, table = build(True), page_tables(2, 10)
    block = block_of(drafter, [1, 2], [3, 4], table)
    block = block.replace(token_ids=jnp.asarray(block.token_ids, token_dtype()))
    state, carry = drafter.init_state(21, 2, 32), drafter.init_carry(1)
    draft = functools.partial(programs(drafter)[1].__wrapped__, params_of())
    out, _ = jax.eval_shape(draft, state, block, carry)
    batch = batch_of(np.zeros((2, 4, 32), np.float32), np.zeros((2, 4)), [0, 0], [4, 4], table)
    batch = batch.replace(next_ids=batch.next_ids.astype(token_dtype()))
    after, relayed = jax.eval_shape(drafter.ingest, params_of(), state, batch)
    assert out.tokens.dtype == token_dtype()
    chex.assert_trees_all_equal_shapes_and_dtypes((after, relayed), (state, carry))
