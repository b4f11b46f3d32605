"""`accept_tree`: `accept` for a block that is a tree of drafts, in one launch.

Files, in reading order: `reference.py`, `triton.py`, `cases.py`, `bench.py`.
"""

from __future__ import annotations

import functools

import jax

from kernels_pallas import checks, dispatch
from kernels_pallas.accept import check_verified
from kernels_pallas.accept_tree import reference, triton
from kernels_pallas.accept_tree.reference import AcceptedTree

__all__ = ["AcceptedTree", "accept_tree"]

BACKENDS = {"triton": triton.refuses}


def accept_tree(
    block_ids: jax.Array,
    parents: jax.Array,
    predicted: jax.Array,
    lens: jax.Array,
    max_lens: jax.Array,
    stop_ids: jax.Array,
    frozen: jax.Array,
    *,
    implementation: str = "xla",
) -> AcceptedTree:
    """Walks a tree of drafts from its root along the target's predictions, then clips as `accept`.

    Node 0 is the root, the bonus token. At each node the target's token is emitted; where a child
    holds that very token (the first one, if several do), the walk goes on there. With parents
    [-1, 0, 1, 2, ...] this is `accept`.

    Args:
      block_ids: token_dtype[B, N] token of each node.
      parents: i32[B, N] each node's parent, which stands before it; -1 for the root and for
        unused nodes.
      predicted: int[B, N] the target's token after each node.
      lens, max_lens, stop_ids, frozen: as in `accept`.
      implementation: "xla", "triton", or what `dispatch.pick` chose.

    Returns:
      What `accept` returns, and `path` i32[B, N]: token i was predicted at node path[i], so KV of
      the committed tokens lies at the nodes path[:num_committed]. Zeros after num_accepted.

    Raises:
      ValueError: a shape or dtype is not as stated.
      UnsupportedKernel: the implementation is unknown.
    """
    check_verified(block_ids, predicted, lens, max_lens, stop_ids, frozen)
    checks.shape("parents", parents, block_ids.shape, "[B, N]")
    checks.int32(parents=parents)
    match dispatch.parse("accept_tree", implementation):
        case "triton", interpret:
            run = functools.partial(triton.accept_tree, interpret=interpret)
        case _:
            run = reference.accept_tree
    return run(block_ids, parents, predicted, lens, max_lens, stop_ids, frozen)
