"""Where a token's KV lives."""

import chex
import jax.numpy as jnp
import pytest

from jaxspec.cache.kv_pages import NULL_PAGE, kv_locs_at, to_null_page

PAGE = 4
TABLE = [[7, 3], [5, 0]]


def locs_of(positions):
    locs = kv_locs_at(jnp.asarray(TABLE, jnp.int32), jnp.asarray([positions] * 2, jnp.int32), PAGE)
    chex.assert_shape(locs, (2, len(positions)))
    chex.assert_type(locs, jnp.int32)
    return locs


@pytest.mark.parametrize(
    ("position", "locs"),
    [(0, [28, 20]), (3, [31, 23]), (4, [12, 0]), (7, [15, 3])],
    ids=str,
)
def test_a_position_lives_at_its_place_in_its_page(position, locs):
    assert locs_of([position])[:, 0].tolist() == locs


def test_a_position_past_the_table_goes_to_the_null_page():
    assert locs_of([8, 9, 100, 1 << 20]).tolist() == [[0, 1, 0, 0]] * 2


def test_what_is_not_kept_goes_to_the_null_page():
    locs = jnp.asarray([[28, 29, 30], [12, 13, 14]], jnp.int32)
    keep = jnp.asarray([[True, False, True], [False, False, False]])
    sent = to_null_page(locs, keep, PAGE)
    chex.assert_type(sent, jnp.int32)
    assert sent.tolist() == [[28, 1, 30], [0, 1, 2]]
    assert NULL_PAGE == 0
