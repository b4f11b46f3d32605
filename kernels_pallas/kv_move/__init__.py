"""Moves rows of KV to other places, in all layers: the accepted path of a tree becomes a chain.

Read `reference.py`, then `triton.py`; `cases.py` names the shapes that tests and `bench.py` share.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.kv_move import reference, triton

__all__ = ["kv_move"]

BACKENDS = {"triton": triton.refuses}


def kv_move(
    kv_pages: tuple[jax.Array, ...],
    sources: jax.Array,
    places: jax.Array,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """Returns every layer's pages with the rows `sources` copied to `places`.

    All rows of a request are read before any of them is written, so that they may overlap. A place
    in page 0 means that nothing is to be moved: that page is not written.

    Example, page size 4, one request in page 2, whose nodes stand in the rows 8..13: for the path
    0, 2, 4 the sources 10, 12 and the places 9, 10 give row 9 what 10 held, and 10 what 12 held.

    Args:
        kv_pages: L arrays [P, 2, J, G, D]; written in place when the caller donates them.
        sources: i32[B, W] flat rows, page * G + offset.
        places: i32[B, W] flat rows, the same in every layer. Outside page 0 they are distinct, and
            none is another request's source.
        implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
        kv_pages.
    """
    chex.assert_equal_shape(kv_pages)
    chex.assert_shape(kv_pages, (None, 2, None, None, None))
    chex.assert_type(kv_pages, kv_pages[0].dtype)
    chex.assert_rank([sources, places], 2)
    chex.assert_equal_shape([sources, places])
    chex.assert_type([sources, places], jnp.int32)
    match dispatch.parse("kv_move", implementation):
        case "triton", interpret:
            run = functools.partial(triton.kv_move, interpret=interpret)
        case _:
            run = reference.kv_move
    return run(kv_pages, sources, places)
