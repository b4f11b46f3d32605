"""Trees of drafts: which nodes to verify, and what each of them sees.

A drafter proposes candidates, each behind another or behind the bonus token, with the logarithm of
its probability along the whole path. The best of them are verified in one pass. Since no candidate
is likelier than the one before it, the best of all form a tree again.

Sources: EAGLE-2 (arXiv 2406.16858) for trees that grow by passes of the drafter; best-first trees
over independent positions for DFlash, whose one pass gives the marginals of all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.future_map import token_dtype

MAX_NODES = 64  # two words of the mask that attention reads


class TreeShape(NamedTuple):
    """The static side of a drafter's trees.

    num_nodes: N, the bonus token included. width: drafts behind a node at most. depth: drafts on a
    path at most.
    """

    num_nodes: int
    width: int
    depth: int


def tree_shape(
    config: EngineConfig, *, depth: int, width: int, most_nodes: Callable[[int], int]
) -> TreeShape | None:
    """The tree that the settings ask for; None for a chain, which a tree of one branch is.

    depth: drafts on a path. width: of a tree whose `tree_topk` is open. most_nodes: of a tree by
    its width, the bonus token included.

    Raises:
        ConfigError: a tree that cannot hold a path, or that there are not enough drafts for.
    """
    if config.tree_nodes is None:
        return None
    num_nodes, width = config.tree_nodes, config.tree_topk or width
    if num_nodes < depth + 1:
        raise ConfigError(
            f"tree_nodes is {num_nodes}, fewer than the {depth + 1} tokens of a path; raise it, or "
            f"lower block_size to {num_nodes}"
        )
    if num_nodes > most_nodes(width):
        raise ConfigError(
            f"tree_nodes is {num_nodes}, but with {width} drafts behind a token and {depth} on a "
            f"path there are {most_nodes(width)}; lower it, or raise tree_topk or block_size"
        )
    return TreeShape(num_nodes, width, depth) if width > 1 else None


class Candidates(NamedTuple):
    """Nodes that could be drafted, parents before children.

    scores: f32[B, C] log-probability along the path, at most the parent's. tokens: token_dtype[B,
    C]. parents: i32[B, C] another candidate, or -1 for the bonus token.
    """

    scores: jax.Array
    tokens: jax.Array
    parents: jax.Array


class Frontier(NamedTuple):
    """The candidates that a growing tree goes on from: index i32[B, k], scores f32[B, k]."""

    index: jax.Array
    scores: jax.Array


class DraftTree(NamedTuple):
    """Drafts to verify: node 0 is the bonus token, a node's parent stands before it.

    tokens: token_dtype[B, N]. parents: i32[B, N], -1 of node 0.
    """

    tokens: jax.Array
    parents: jax.Array


def best_tokens(scores: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens: scores f32[..., V] -> log-probabilities f32[..., k], token_dtype."""
    log_probs, tokens = lax.top_k(jax.nn.log_softmax(scores, axis=-1), width)
    return log_probs, tokens.astype(token_dtype())


def plant(scores: jax.Array, tokens: jax.Array) -> tuple[Candidates, Frontier]:
    """Starts a tree with the k likeliest first drafts.

    scores: f32[B, k] log-probabilities. tokens: token_dtype[B, k].
    """
    index = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :], scores.shape)
    return Candidates(scores, tokens, jnp.full_like(index, -1)), Frontier(index, scores)


def grow(
    candidates: Candidates, frontier: Frontier, scores: jax.Array, tokens: jax.Array
) -> tuple[Candidates, Frontier, jax.Array]:
    """Adds k children behind each of the k candidates of a frontier; the best k go on.

    scores: f32[B, k, k] log-probability of each child behind its own parent. tokens: token_dtype[B,
    k, k].

    Returns:
        All candidates, the new frontier, and i32[B, k] which of the old one's entries each of the
        new ones stands behind (whose hidden state its pass reads).
    """
    batch, count, width = scores.shape
    path = (frontier.scores[:, :, None] + scores).reshape(batch, count * width)
    parents = jnp.repeat(frontier.index, width, axis=1)
    best, chosen = lax.top_k(path, count)
    chosen = chosen.astype(jnp.int32)
    first = candidates.scores.shape[1]
    added = Candidates(path, tokens.reshape(batch, count * width), parents)
    joined = Candidates(
        *(jnp.concatenate(pair, axis=1) for pair in zip(candidates, added, strict=True))
    )
    return joined, Frontier(first + chosen, best), chosen // width


def keep_best(candidates: Candidates, bonus: jax.Array, num_nodes: int) -> DraftTree:
    """Keeps the likeliest candidates behind the bonus token: a tree of `num_nodes` in all.

    Of equals the earlier is kept, so that a parent never goes before its child.

    bonus: token_dtype[B].

    Raises:
        ValueError: more nodes than the mask holds, or than there are candidates.
    """
    batch, count = candidates.scores.shape
    if not 2 <= num_nodes <= min(MAX_NODES, count + 1):
        raise ValueError(
            f"a tree of {num_nodes} nodes is not possible: the bonus token has {count} candidates "
            f"behind it and attention's mask holds {MAX_NODES}; use 2 to "
            f"{min(MAX_NODES, count + 1)}"
        )
    _, index = lax.top_k(candidates.scores, num_nodes - 1)
    index = jnp.sort(index, axis=1)
    rows = jnp.arange(batch)[:, None]
    node = jnp.arange(1, num_nodes, dtype=jnp.int32)[None, :]
    # The node of each candidate; one past the end stands for the bonus token, node 0.
    node_of = jnp.zeros((batch, count + 1), jnp.int32).at[rows, index].set(node)
    parents = jnp.take_along_axis(candidates.parents, index, axis=1)
    parents = jnp.take_along_axis(node_of, jnp.where(parents < 0, count, parents), axis=1)
    tokens = jnp.take_along_axis(candidates.tokens, index, axis=1)
    return DraftTree(
        tokens=jnp.concatenate([bonus[:, None], tokens], axis=1),
        parents=jnp.concatenate([jnp.full((batch, 1), -1, jnp.int32), parents], axis=1),
    )


def best_first(log_probs: jax.Array, tokens: jax.Array, num_nodes: int) -> Candidates:
    """Candidates among which are the likeliest paths over independent positions.

    Fewer than n paths are likelier than one among the n likeliest, so n paths a depth are enough;
    the ranks of its tokens multiply to n at most, so n tokens a position are.

    log_probs: f32[B, K, k] of the k likeliest tokens of each position, in falling order.
    tokens: token_dtype[B, K, k].
    num_nodes: of the tree that will be kept, the bonus token included.
    """
    batch, depth, width = log_probs.shape
    wanted = num_nodes - 1
    scores, parents = jnp.zeros((batch, 1), jnp.float32), jnp.full((batch, 1), -1, jnp.int32)
    layers, first = [], 0
    for position in range(depth):
        path = (scores[:, :, None] + log_probs[:, position, None, :]).reshape(batch, -1)
        scores, chosen = lax.top_k(path, min(wanted, path.shape[1]))
        chosen = chosen.astype(jnp.int32)
        layers.append(
            Candidates(
                scores=scores,
                tokens=jnp.take_along_axis(tokens[:, position], chosen % width, axis=1),
                parents=jnp.take_along_axis(parents, chosen // width, axis=1),
            )
        )
        count = scores.shape[1]
        index = first + jnp.arange(count, dtype=jnp.int32)[None, :]
        parents, first = jnp.broadcast_to(index, (batch, count)), first + count
    return Candidates(*(jnp.concatenate(parts, axis=1) for parts in zip(*layers, strict=True)))


def num_best_first(num_nodes: int, depth: int, width: int) -> int:
    """Candidates that `best_first` finds, and the bonus token."""
    total, layer = 1, 1
    for _ in range(depth):
        layer = min(num_nodes - 1, layer * width)
        total += layer
    return total


def ancestors(parents: jax.Array, depth: int | None = None) -> jax.Array:
    """bool[B, N, N]: True where node j is node i or one before it, from parents i32[B, N].

    depth: of the deepest node at most, which saves passes; None for any tree.
    """
    num_nodes = parents.shape[1]
    node = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    reach = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool)[None], (*parents.shape, num_nodes))
    jump = jnp.where(parents < 0, node, parents)
    # Every pass doubles how far back a node sees.
    for _ in range((num_nodes - 1 if depth is None else depth).bit_length()):
        reach |= jnp.take_along_axis(reach, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return reach


def block_mask(reach: jax.Array) -> jax.Array:
    """Packs `ancestors` for `paged_attention`: u32[B, N, ceil(N / 32)], bit j of word j // 32."""
    batch, num_nodes, _ = reach.shape
    words = -(-num_nodes // 32)
    padded = jnp.pad(reach, ((0, 0), (0, 0), (0, words * 32 - num_nodes)))
    bits = padded.reshape(batch, num_nodes, words, 32).astype(jnp.uint32)
    weights = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    return (bits * weights[None, None, None, :]).sum(axis=-1, dtype=jnp.uint32)


def depths(reach: jax.Array) -> jax.Array:
    """i32[B, N] how far each node is behind the bonus token; its position is seq_len + depth."""
    return reach.sum(axis=-1, dtype=jnp.int32) - 1
