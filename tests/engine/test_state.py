"""The donated state, and the packed arrays between host and device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.state import (
    DecodeBatch,
    Limits,
    PrefillBatch,
    StepOutput,
    empty_prefill_batch,
    init_state,
    pack_limits,
    pack_prefill_tile,
)
from jaxspec.future_map import token_dtype
from tests.fakes import VOCAB, build_table_target
from tests.harness import PAGE, TILE, drafter_named, make_geometry

GEOMETRY = make_geometry()


def packed_tile(**changes):
    limits = dict(max_len=29, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, stop_ids=[2, 31])
    limits_row = pack_limits(
        GEOMETRY, key=np.array([0xDEADBEEF, 7], np.uint32), **{**limits, **changes}
    )
    packed = empty_prefill_batch(2, GEOMETRY)
    pack_prefill_tile(
        packed[0],
        GEOMETRY,
        row=3,
        start=8,
        is_first=True,
        tokens=np.array([4, 5, 6], np.int32),
        next_id=9,
        limits_row=limits_row,
        page_row=np.arange(1, 21, dtype=np.int32),
    )
    return packed


def test_a_prefill_tile_arrives_as_it_was_packed(x64):
    batch = PrefillBatch.unpack(jnp.asarray(packed_tile()), GEOMETRY)
    chex.assert_type(batch.token_ids, token_dtype())
    chex.assert_type([batch.rows, batch.lens, batch.num_valid, batch.page_table], jnp.int32)
    chex.assert_shape(batch.token_ids, (2, TILE))
    chex.assert_shape(batch.page_table, (2, 20))
    chex.assert_shape(batch.limits.stop_ids, (2, 4))
    assert batch.rows.tolist() == [3, 0]
    assert batch.lens.tolist() == [8, 0]
    assert batch.num_valid.tolist() == [3, 1]
    assert batch.is_first.tolist() == [True, False]
    assert batch.is_final.tolist() == [False, False]
    assert batch.next_ids.tolist() == [9, 0]
    assert batch.token_ids.tolist() == [[4, 5, 6, 0], [0, 0, 0, 0]]
    assert batch.page_table.tolist() == [list(range(1, 21)), [0] * 20]


def test_limits_travel_by_bit_pattern(x64):
    limits = PrefillBatch.unpack(jnp.asarray(packed_tile()), GEOMETRY).limits
    sampling = limits.sampling
    chex.assert_type([sampling.temperature, sampling.top_p, sampling.min_p], jnp.float32)
    chex.assert_type(sampling.key, jnp.uint32)
    assert limits.max_lens.tolist() == [29, 0]
    assert limits.stop_ids.tolist() == [[2, 31, VOCAB, VOCAB], [VOCAB] * 4]
    assert limits.frozen.tolist() == [False, True]
    assert sampling.temperature[0] == np.float32(0.7)
    assert sampling.top_p[0] == np.float32(0.9)
    assert sampling.min_p[0] == np.float32(0.05)
    assert sampling.top_k.tolist() == [5, 0]
    assert sampling.key.tolist() == [[0xDEADBEEF, 7], [0, 0]]


def test_the_last_tile_of_a_prompt_is_final():
    packed = empty_prefill_batch(1, GEOMETRY)
    limits_row = np.zeros(11, np.int32)
    page_row = np.zeros(20, np.int32)
    tokens = np.array([4], np.int32)
    common = dict(row=1, start=0, tokens=tokens, limits_row=limits_row, page_row=page_row)
    common["is_first"] = False
    for next_id, is_final in ((None, True), (0, False)):
        pack_prefill_tile(packed[0], GEOMETRY, next_id=next_id, **common)
        batch = PrefillBatch.unpack(jnp.asarray(packed), GEOMETRY)
        assert batch.is_final.tolist() == [is_final]
        assert batch.is_first.tolist() == [False]


def test_a_decode_batch_is_rows_and_their_pages():
    packed = jnp.asarray([[2, 7, 8, 9], [0, 0, 0, 0]], jnp.int32)
    batch = DecodeBatch.unpack(packed)
    assert batch.rows.tolist() == [2, 0]
    assert batch.page_table.tolist() == [[7, 8, 9], [0, 0, 0]]


def test_the_output_is_read_by_columns():
    packed = np.array([[[5, 6, 0, 2, 1, 1, 8], [0, 0, 0, 0, 0, 0, 0]]], np.int32)
    output = StepOutput.unpack(packed, 3, VOCAB)
    chex.assert_shape(output.tokens, (1, 2, 3))
    row = output.row(0, 0)
    assert row.tokens.tolist() == [5, 6, 0]
    assert (row.num_committed, row.num_accepted, row.finished, row.errors) == (2, 1, True, 8)
    assert output.finished.dtype == bool
    assert not output.row(0, 1).finished


def test_row_zero_of_the_limits_stays_frozen():
    limits = Limits.create(3, 4, VOCAB)
    assert limits.frozen.tolist() == [True] * 4
    rows = jnp.asarray([0, 2, 0], jnp.int32)
    live = Limits.create(2, 4, VOCAB).replace(frozen=jnp.zeros(3, bool))
    limits = limits.put(rows, live)
    assert limits.frozen.tolist() == [True, True, False, True]
    limits = limits.freeze(rows, jnp.zeros(3, bool))
    assert limits.frozen.tolist() == [True, True, False, True]
    assert limits.freeze(rows, jnp.ones(3, bool)).frozen.tolist() == [True] * 4


def test_limits_of_rows_are_gathered():
    limits = Limits.create(3, 4, VOCAB).replace(max_lens=jnp.arange(4, dtype=jnp.int32))
    taken = limits.of(jnp.asarray([3, 0, 1], jnp.int32))
    assert taken.max_lens.tolist() == [3, 0, 1]
    assert taken.bounds.max_lens is taken.max_lens
    chex.assert_shape(taken.stop_ids, (3, 4))


@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted"])
def test_every_leaf_of_the_state_is_a_buffer_of_its_own(drafter):
    """F12: one buffer in two leaves could not be donated."""
    geometry = make_geometry(block_size=1) if drafter == "none" else GEOMETRY
    state = init_state(geometry, build_table_target(PAGE), drafter_named(drafter))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    chex.assert_shape(state.future_map.output_tokens, (geometry.num_slots + 1,))
    chex.assert_shape(state.kv, (geometry.num_pages, 2, 1, PAGE, 2))
