"""`accept_tree` as one Pallas-Triton launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.accept.reference import Accepted
from kernels_pallas.accept.triton import accepted_shapes, commit, lanes
from kernels_pallas.accept_tree.reference import AcceptedTree


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def accept_tree(
    block_ids, parents, predicted, lens, max_lens, stop_ids, frozen, *, interpret
) -> AcceptedTree:
    """See `accept_tree`. Grid: (B,); a lane holds one node, and one column of the packed output."""
    batch, block_size = block_ids.shape
    *accepted, path = pl.pallas_call(
        _kernel,
        name="accept_tree",
        grid=(batch,),
        out_shape=(
            *accepted_shapes(batch, block_size, block_ids.dtype),
            jax.ShapeDtypeStruct((batch, block_size), jnp.int32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(block_ids, parents, predicted, lens, max_lens, stop_ids, frozen)
    return AcceptedTree(Accepted(*accepted), path)


def _kernel(
    block_ids_ref,  # [B, N]
    parents_ref,  # [B, N]
    predicted_ref,  # [B, N]
    lens_ref,  # [B]
    max_lens_ref,  # [B]
    stop_ids_ref,  # [B, E]
    frozen_ref,  # [B]
    *result_refs,
):
    b = pl.program_id(0)
    block_size = block_ids_ref.shape[1]
    lane = lanes(block_size)
    in_block = lane < block_size
    block_ids = pltriton.load(block_ids_ref.at[b, lane], mask=in_block, other=0)
    parents = pltriton.load(parents_ref.at[b, lane], mask=in_block, other=-1)

    def step(walk):
        depth, node, _, path, emitted = walk
        token = pltriton.load(predicted_ref.at[b, node]).astype(block_ids.dtype)
        path = jnp.where(lane == depth, node, path)
        emitted = jnp.where(lane == depth, token, emitted)
        # A child stands after its parent, so the walk ends whatever `parents` holds.
        children = (parents == node) & (block_ids == token) & (lane > node) & in_block
        child = jnp.min(jnp.where(children, lane, block_size))
        return depth + 1, jnp.minimum(child, block_size - 1), child < block_size, path, emitted

    zero = jnp.int32(0)
    start = (zero, zero, jnp.bool_(True), jnp.zeros_like(lane), jnp.zeros_like(block_ids))
    depth, _, _, path, emitted = jax.lax.while_loop(lambda walk: walk[2], step, start)
    *accepted_refs, path_ref = result_refs
    limits = (lens_ref, max_lens_ref, stop_ids_ref, frozen_ref)
    commit(b, emitted, depth - 1, block_ids_ref, limits, accepted_refs)
    frozen = pltriton.load(frozen_ref.at[b])
    pltriton.store(path_ref.at[b, lane], jnp.where(frozen, 0, path), mask=in_block)
