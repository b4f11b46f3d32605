from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.kv_move import cases, kv_move
from tests.kernels import jitting

jitted = functools.cache(functools.partial(jitting.jit, kv_move))


def move(args, implementation):
    return jax.tree.map(np.asarray, jitted(implementation)(*args))


def oracle(kv_pages, sources, places):
    """Row by row in numpy: what was read first is written later."""
    moved = [np.array(pages) for pages in kv_pages]
    page_size = moved[0].shape[3]
    for before, after in zip(kv_pages, moved, strict=True):
        for at in np.ndindex(places.shape):
            (page, offset), place = divmod(int(sources[at]), page_size), int(places[at])
            if place >= page_size:
                after[place // page_size, ..., place % page_size, :] = before[page, ..., offset, :]
    return tuple(moved)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, _ = cases.make_inputs(case)
    for actual, exact in zip(move(args, implementation), oracle(*args), strict=True):
        np.testing.assert_array_equal(actual, exact)


def pool(*, layers=2):
    """Pages of four rows; every number is its row's, and its layer's hundred."""
    rows = jnp.arange(5 * 4, dtype=jnp.float32).reshape(5, 1, 1, 4, 1)
    rows = jnp.broadcast_to(rows, (5, 2, 3, 4, 16))
    return tuple(rows + 100 * layer for layer in range(layers))


def rows_after(implementation, sources, places):
    """What the rows of the two layers hold, each the same throughout."""
    ids = (jnp.asarray(sources, jnp.int32), jnp.asarray(places, jnp.int32))
    moved = move((pool(), *ids), implementation)
    flat = [pages.transpose(0, 3, 1, 2, 4).reshape(20, -1) for pages in moved]
    for rows in flat:
        assert (rows == rows[:, :1]).all()
    first, second = (rows[:, 0].tolist() for rows in flat)
    assert second == [100 + row for row in first]
    return [int(row) for row in first]


def test_a_path_closes_up_over_rows_that_it_reads_itself(implementation):
    # Nodes in pages 2 and 4; the path 0, 2, 3, 5.
    after = rows_after(implementation, [[10, 11, 17]], [[9, 10, 11]])
    assert after[8:12] == [8, 10, 11, 17]
    assert after[:8] == list(range(8)) and after[12:] == list(range(12, 20))


def test_rows_may_also_move_up_over_each_other(implementation):
    assert rows_after(implementation, [[9, 10, 11]], [[10, 11, 9]])[8:12] == [8, 11, 9, 10]


def test_places_in_the_null_page_move_nothing(implementation):
    assert rows_after(implementation, [[8, 9], [12, 13]], [[1, 2], [3, 0]]) == list(range(20))


def test_what_stays_where_it_is_may_hold_anything(implementation):
    (first, second), ids = pool(), jnp.asarray([[9, 14]], jnp.int32)
    poisoned = first.at[2, :, :, 1].set(jnp.nan)
    moved, _ = move(((poisoned, second), ids, jnp.asarray([[9, 13]], jnp.int32)), implementation)
    assert np.isnan(moved[2, :, :, 1]).all()
    assert (moved[3, :, :, 1] == 14).all() and np.isfinite(moved[3]).all()


def test_all_layers_are_one_launch_in_place():
    args, _ = cases.make_inputs(cases.CASES[2])
    text = testing.lower_for_cuda(functools.partial(kv_move, implementation="triton"), *args)
    assert text.count("custom_call") == 1
    assert text.count("output_operand_alias<") == 3


def test_shapes_and_dtypes_are_checked():
    ids = jnp.zeros((2, 3), jnp.int32)
    first, second = pool()
    wrong = [
        ((first, second[1:]), ids, ids),
        ((first, second.astype(jnp.bfloat16)), ids, ids),
        ((first[:, :1],), ids, ids),
        ((first,), ids, ids[:, 1:]),
        ((first,), ids, ids.astype(jnp.uint32)),
        ((first,), ids[0], ids[0]),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            jax.eval_shape(kv_move, *args)
