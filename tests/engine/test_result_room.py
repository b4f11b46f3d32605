"""Small results lie in places of their own, so that a step's graph is launched as it is."""

import chex
import jax.numpy as jnp

from jaxspec.engine.result_room import make_room_for_results


def test_what_keeps_the_places_apart_is_small():
    kept = make_room_for_results()
    assert 1 < len(kept) < 100
    for array in kept:
        chex.assert_shape(array, (4096,))
        chex.assert_type(array, jnp.uint8)
