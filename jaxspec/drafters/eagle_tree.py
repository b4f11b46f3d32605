"""EAGLE-2's dynamic tree: every pass goes on from the k likeliest leaves, k children each.

The leaves of a pass stand at one position but in k rows of the drafter's KV. The rows of all passes
lie one behind the other from seq_len on; a leaf sees what is committed and its own path.

Example, seq_len 6, k = 2: the first pass puts two drafts of position 7 into rows 6 and 7, both
rotated as position 6, the second one their best children into rows 8 and 9, rotated as position 7.
If both children stand behind the second draft, each of them sees rows 0..5, 7 and itself.

Source: EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.base import DraftBlock, DraftContext, ModelParams
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_network import Network, to_target_ids, to_target_vocabulary
from jaxspec.drafters.tree import (
    TreeShape,
    best_tokens,
    block_mask,
    grow,
    keep_best,
    plant,
    tree_shape,
)

_WIDTH = 8  # leaves of a pass; more cost rows of every pass and are rarely on the path


def build_tree_draft(network: Network, config: EagleConfig, tree: TreeShape):
    """Builds `Drafter.draft` for trees; the carry holds k first drafts."""
    width = tree.width

    def children(
        params: ModelParams, normed: jax.Array, context: DraftContext, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and tokens [B, n, k] behind outputs [B, n, E]; position: i32[B]."""
        logits = network.logits(params, normed)
        if context.greedy:
            log_probs, drafts = best_tokens(logits, width)
            return log_probs, to_target_ids(params.drafter, drafts)
        logits = to_target_vocabulary(params.drafter, logits, config)
        positions = jnp.broadcast_to(position[:, None], normed.shape[:2])
        return best_tokens(context.scores(logits, positions), width)

    def draft(
        params: ModelParams, kv: jax.Array, context: DraftContext
    ) -> tuple[DraftBlock, jax.Array]:
        block, carry = context.block, context.carry
        first = carry.hidden_states[:, None]
        # What a sampling row draws depends on its parameters, which the ingest does not know.
        if context.greedy:
            scores, tokens = jnp.log(carry.topk_p), carry.topk_index
        else:
            scores, tokens = children(params, network.norm(params, first), context, block.lens + 1)
            scores, tokens = scores[:, 0], tokens[:, 0]
        candidates, frontier = plant(scores, tokens)
        hidden = jnp.broadcast_to(first, (*tokens.shape, first.shape[-1]))
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool)[None], (*tokens.shape, width))
        reach = own
        for step in range(1, tree.depth):
            leaves = block.columns((step - 1) * width, step * width).replace(
                token_ids=jnp.take_along_axis(candidates.tokens, frontier.index, axis=1),
                positions=jnp.broadcast_to(block.lens[:, None] + (step - 1), tokens.shape),
                mask=block_mask(_behind_others(reach)),
            )
            outputs, kv = network.forward(params, kv, hidden, leaves.token_ids, leaves)
            scores, drafts = children(params, outputs.normed, context, block.lens + (step + 1))
            candidates, frontier, parent = grow(candidates, frontier, scores, drafts)
            hidden = jnp.take_along_axis(outputs.hidden, parent[:, :, None], axis=1)
            reach = jnp.take_along_axis(reach, parent[:, :, None], axis=1)
            reach = jnp.concatenate([reach, own], axis=2)
        drafts, parents = keep_best(candidates, block.token_ids[:, 0], tree.num_nodes)
        count = jnp.full_like(context.rows, tree.num_nodes - 1)
        return DraftBlock(drafts, count, parents), kv

    return draft


def _behind_others(reach: jax.Array) -> jax.Array:
    """bool[B, k, R] -> bool[B, R, R]: the leaves are the last of R rows."""
    num_rows = reach.shape[2]
    return jnp.pad(reach, ((0, 0), (num_rows - reach.shape[1], 0), (0, 0)))


def eagle_tree_shape(
    settings: EngineConfig, config: EagleConfig, block_size: int
) -> TreeShape | None:
    """The tree that the settings ask for; None for a chain.

    Raises:
        ConfigError: a tree that cannot be, or that the layer's window or the rows of a verify step
            leave no room for.
    """
    depth, num_nodes = block_size - 1, settings.tree_nodes or 0
    num_passes = depth - 1
    tree = tree_shape(
        settings,
        depth=depth,
        width=max(1, min(_WIDTH, num_nodes // max(num_passes, 1))),
        most_nodes=lambda width: 1 + width + num_passes * width**2,
    )
    if tree is None:
        return None
    if tree.width > config.draft_vocab_size:
        raise ConfigError(
            f"tree_topk is {tree.width}, but the drafter's vocabulary has "
            f"{config.draft_vocab_size} tokens; lower it"
        )
    if num_passes * tree.width > num_nodes:
        raise ConfigError(
            f"tree_topk {tree.width} over {depth} drafts a path takes {num_passes * tree.width} "
            f"rows of the drafter's KV, more than tree_nodes {num_nodes}; raise that, or lower "
            "tree_topk or block_size"
        )
    window = settings.draft_window or config.window
    if window is not None:
        raise ConfigError(
            f"tree_nodes is {num_nodes}, but the drafter looks back over {window} positions, and "
            "trees need all of them; leave out draft_window, or tree_nodes"
        )
    return tree
