"""What `accept_tree` means, in plain `jax.numpy`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.accept.reference import Accepted, commit


class AcceptedTree(NamedTuple):
    """What a verified tree commits, and along which of its nodes."""

    accepted: Accepted
    path: jax.Array  # i32[B, N] node whose prediction is token i; zeros after num_accepted


def accept_tree(block_ids, parents, predicted, lens, max_lens, stop_ids, frozen) -> AcceptedTree:
    batch, block_size = block_ids.shape
    predicted = predicted.astype(block_ids.dtype)
    nodes = jnp.arange(block_size, dtype=jnp.int32)[None, :]

    def step(depth, walk):
        node, alive, num_accepted, path, emitted = walk
        token = jnp.take_along_axis(predicted, node[:, None], axis=1)
        here = (nodes == depth) & alive[:, None]
        path = jnp.where(here, node[:, None], path)
        emitted = jnp.where(here, token, emitted)
        # A child stands after its parent, so the walk ends whatever `parents` holds.
        children = (parents == node[:, None]) & (block_ids == token) & (nodes > node[:, None])
        child = jnp.where(children, nodes, block_size).min(axis=1)
        alive = alive & (child < block_size)
        num_accepted = num_accepted + alive.astype(jnp.int32)
        return jnp.where(alive, child, node), alive, num_accepted, path, emitted

    start = (
        jnp.zeros((batch,), jnp.int32),
        jnp.ones((batch,), jnp.bool_),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, block_size), jnp.int32),
        jnp.zeros_like(predicted),
    )
    _, _, num_accepted, path, emitted = jax.lax.fori_loop(0, block_size, step, start)
    path = jnp.where(frozen[:, None], 0, path)
    accepted = commit(emitted, num_accepted, block_ids[:, 0], lens, max_lens, stop_ids, frozen)
    return AcceptedTree(accepted, path)
