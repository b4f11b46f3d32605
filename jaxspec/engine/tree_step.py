"""What a decode step does more where the drafts are a tree: nothing of it is traced for a chain.

The nodes of a tree lie one behind the other in the pages, at the rows seq_len, seq_len + 1, ...,
whatever their depth. Once the target has chosen a path, its rows are moved together, and all that
comes after sees the chain of the path.

Example, seq_len 6, parents [-1, 0, 0, 1, 2, 4]: the rows 6..11 hold tokens of the positions 6, 7,
7, 8, 8, 9. If the path is 0, 2, 4, the rows 8 and 10 move to 7 and 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import Kernels
from jaxspec.drafters.base import DraftBlock
from jaxspec.drafters.tree import ancestors, block_mask, depths
from jaxspec.models.base import Block
from kernels_pallas.kv_move import kv_move


def lay_out(draft: DraftBlock, block: Block, depth: int | None) -> Block:
    """The block that the target verifies, from the one that was prepared for the drafts.

    depth: of the drafter's trees.
    """
    block = block.replace(token_ids=draft.tokens)
    if draft.parents is None:
        return block
    reach = ancestors(draft.parents, depth)
    positions = block.lens[:, None] + depths(reach)
    return block.replace(positions=positions, mask=block_mask(reach))


def straighten(
    path: jax.Array | None,
    places: jax.Array,
    block: Block,
    kv: tuple[jax.Array, ...],
    features: jax.Array,
    finite: jax.Array,
    *,
    kernels: Kernels,
) -> tuple[Block, tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Makes a verified block the chain of its accepted path: tokens, KV rows and features.

    path: i32[B, N] from `verify`; None where the block is a chain already.
    places: i32[B, W] flat KV rows of the chain, W the longest path; the null page past its end.
    kv: pages of each layer. features: [B, N, F * E] and finite: bool[B, N] of each node.
    Returns (block, kv, features, finite).
    """
    if path is None:
        return block.replace(kv_locs=places), kv, features, finite
    width = places.shape[1]
    path = path[:, :width]

    def along(values: jax.Array) -> jax.Array:
        index = path.reshape(*path.shape, *[1] * (values.ndim - 2))
        return jnp.take_along_axis(values, index, axis=1)

    with jax.named_scope("straighten"):
        # The root is where it belongs.
        sources = along(block.kv_locs)[:, 1:]
        kv = kv_move(kv, sources, places[:, 1:], implementation=kernels.kv_move)
        chain = block.replace(
            token_ids=along(block.token_ids),
            positions=block.lens[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :],
            kv_locs=places,
            mask=None,
        )
        return chain, kv, along(features), along(finite)
