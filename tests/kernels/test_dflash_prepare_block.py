from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.dflash_prepare_block import cases, dflash_prepare_block
from tests.kernels import relay_oracle

jitted = jax.jit(
    dflash_prepare_block,
    static_argnames=("mask_token_id", "block_size", "page_size", "implementation"),
)


def prepare(bonus, lens, page_table, implementation, **static):
    return jitted(
        testing.array(bonus, testing.token_dtype()),
        testing.array(lens, jnp.int32),
        testing.array(page_table, jnp.int32),
        implementation=implementation,
        **static,
    )


def test_every_case_equals_the_oracle(case, implementation, token_width):
    args, static = cases.make_inputs(case)
    run = functools.partial(dflash_prepare_block, **static, implementation=implementation)
    relay_oracle.assert_prepared(jax.jit(run)(*args), relay_oracle.prepared(*args, **static))


def test_a_block_crosses_into_the_next_page(implementation):
    result = prepare([5], [3], [[7, 2]], implementation, mask_token_id=9, block_size=4, page_size=4)
    np.testing.assert_array_equal(result.block_ids, [[5, 9, 9, 9]])
    np.testing.assert_array_equal(result.positions, [[3, 4, 5, 6]])
    np.testing.assert_array_equal(result.kv_locs, [[31, 8, 9, 10]])


def test_places_past_the_table_go_to_page_zero(implementation):
    result = prepare([5], [6], [[7, 2]], implementation, mask_token_id=9, block_size=4, page_size=4)
    np.testing.assert_array_equal(result.kv_locs, [[10, 11, 0, 1]])


def test_places_before_the_first_go_to_page_zero(implementation):
    result = prepare(
        [5], [-2], [[7, 2]], implementation, mask_token_id=9, block_size=4, page_size=4
    )
    np.testing.assert_array_equal(result.kv_locs, [[2, 3, 28, 29]])


def test_a_padding_row_stays_in_page_zero(implementation):
    result = prepare([0], [1], [[0, 0]], implementation, mask_token_id=9, block_size=4, page_size=4)
    np.testing.assert_array_equal(result.kv_locs, [[1, 2, 3, 0]])


@pytest.mark.parametrize("block_size", [3, 17, 32, 63])
def test_any_block_size_goes(block_size):
    args = (
        testing.array([3, 4, 5], jnp.int32),
        testing.array([1, 63, 65], jnp.int32),
        testing.array([[4, 1], [5, 2], [6, 3]], jnp.int32),
    )
    static = {"mask_token_id": 9, "block_size": block_size, "page_size": 64}
    result = jitted(*args, **static, implementation="triton_interpret")
    relay_oracle.assert_prepared(result, relay_oracle.prepared(*args, **static))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bonus": np.zeros((2, 2), np.int32)}, r"bonus has shape \(2, 2\), but must be \[B\]"),
        ({"bonus": np.zeros(2, np.uint32)}, "bonus is uint32, but tokens are int32 or int64"),
        ({"lens": np.zeros(3, np.int32)}, r"lens has shape \(3,\), but \[B\] needs \(2,\)"),
        ({"page_table": np.zeros((3, 4), np.int32)}, r"page_table has shape .* needs \(2, 4\)"),
        ({"page_table": np.zeros((2, 0), np.int32)}, "num_pages=0 is below 1"),
        ({"page_size": 0}, "page_size=0 is below 1"),
        ({"block_size": 65}, r"block_size=65 is outside 1\.\.64; take a drafter with smaller"),
        ({"implementation": "mosaic_gpu"}, "'mosaic_gpu' is unknown; take one of xla, triton"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "bonus": np.zeros(2, np.int32),
        "lens": np.ones(2, np.int32),
        "page_table": np.zeros((2, 4), np.int32),
        "mask_token_id": 9,
        "block_size": 4,
        "page_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        dflash_prepare_block(**(arguments | change))
