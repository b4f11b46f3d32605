"""EAGLE: one decoder layer that goes on from the target's features, a token a pass.

Row j of the drafter is made from the feature of position j and the token at j + 1, stands at
position j and predicts the token at j + 2. Its KV lies in pages of its own under the target's page
ids. `ingest` makes the rows whose features the target has just computed; the last of them predicts
the first draft, which is relayed. `draft` goes on from there with the drafter's own outputs in
place of features: K drafts take K - 1 passes, whose rows lie behind seq_len, where the rows of
committed tokens later overwrite them. `eagle_tree.py` drafts trees in the same way.

Example, seq_len 6 and the bonus token at 6: rows 0..5 are final, row 5 predicted draft 7; the
passes write rows 6, 7, ... and predict drafts 8, 9, ...

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import (
    DraftBlock,
    DraftContext,
    Drafter,
    DrafterPlan,
    DrafterSetup,
    IngestBatch,
    ModelParams,
    kv_and_shapes,
)
from jaxspec.drafters.eagle_checkpoint import load_eagle
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_network import (
    build_network,
    highest_probability,
    project_features,
    to_target_ids,
    to_target_vocabulary,
)
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.drafters.eagle_tree import build_tree_draft, eagle_tree_shape
from jaxspec.drafters.tree import TreeShape, best_tokens
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Kernels, Target
from jaxspec.sampling import greedy_tokens

DEFAULT_BLOCK_SIZE = 6  # five drafts; a sixth is rarely right and costs a pass as any other


class EagleCarry(NamedTuple):
    """What the ingest relays to the next draft, a row a request.

    topk_p: f32[B, k] the drafter's probabilities of its first drafts, one of a chain.
    topk_index: token_dtype[B, k] those drafts, ids of the target. hidden_states: [B, E] what the
    next pass reads in place of a feature, and what a batch with sampling rows draws its first
    drafts from.
    """

    topk_p: jax.Array
    topk_index: jax.Array
    hidden_states: jax.Array


def plan_eagle(setup: DrafterSetup) -> DrafterPlan:
    """Loads an EAGLE checkpoint and checks it against the target and the settings.

    Raises:
        ModelFileError: the checkpoint is unfit for the target.
        ConfigError: a tree that the settings or the checkpoint leave no room for.
    """
    return plan_from_params(*load_eagle(setup.checkpoint, setup.target, setup.dtype), setup)


def plan_from_params(config: EagleConfig, params: EagleParams, setup: DrafterSetup) -> DrafterPlan:
    """`plan_eagle` for weights that are on the device already.

    Raises:
        ConfigError: as `plan_eagle`.
    """
    block_size = setup.config.block_size or DEFAULT_BLOCK_SIZE
    tree = eagle_tree_shape(setup.config, config, block_size)

    def build(target: Target, page_size: int, kernels: Kernels) -> Drafter:
        return build_eagle(
            config,
            target,
            block_size=block_size,
            page_size=page_size,
            dtype=jnp.dtype(setup.dtype),
            kernels=kernels,
            draft_window=setup.config.draft_window,
            tree=tree,
        )

    kv_bytes, shapes = kv_and_shapes(config, 1, setup.dtype)
    return DrafterPlan(
        params=params,
        feature_layers=config.feature_layers,
        block_size=block_size if tree is None else tree.num_nodes,
        kv_bytes_per_token=kv_bytes,
        kernel_shapes=shapes,
        build=build,
        takes_trees=True,
        tree_depth=None if tree is None else tree.depth,
    )


@functools.lru_cache(maxsize=64)
def build_eagle(
    config: EagleConfig,
    target: Target,
    *,
    block_size: int,
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
    draft_window: int | None = None,
    tree: TreeShape | None = None,
) -> Drafter:
    """Builds the pure functions of an EAGLE drafter; equal arguments give the same `Drafter`.

    Rotary angles are computed for any position, so a drafter drafts as far as its target goes,
    whatever `max_position_embeddings` its config repeats from its training.

    Args:
        config: sizes and variant.
        target: whose embedding and head serve where the checkpoint has none.
        block_size: N, the bonus token and a chain of N - 1 drafts.
        page_size: G, as the target's KV.
        dtype: of parameters, activations and KV, as the target's.
        kernels: the implementation of each op.
        draft_window: positions that its layer looks back over at most; None leaves it as trained.
        tree: what to draft in place of a chain.

    Raises:
        ValueError: a block without room for a draft.
    """
    if block_size < 2:
        raise ValueError(f"block size {block_size} leaves no room for a draft; use 2 or more")
    num_draft_tokens = block_size - 1
    num_first = 1 if tree is None else tree.width
    network = build_network(config, target, kernels=kernels, draft_window=draft_window)

    def init_state(num_pages: int, num_slots: int, max_len: int) -> jax.Array:
        return jnp.zeros((num_pages, 2, config.num_kv_heads, page_size, config.head_dim), dtype)

    def init_carry(num_slots: int) -> EagleCarry:
        return EagleCarry(
            topk_p=jnp.zeros((num_slots + 1, num_first), jnp.float32),
            topk_index=jnp.zeros((num_slots + 1, num_first), token_dtype()),
            hidden_states=jnp.zeros((num_slots + 1, config.hidden_size), dtype),
        )

    def next_tokens(
        params: ModelParams, normed: jax.Array, context: DraftContext, positions: jax.Array
    ) -> jax.Array:
        """The drafts at positions i32[B, 1], from [B, 1, E]: token_dtype[B, 1]."""
        logits = network.logits(params, normed)
        if context.greedy:
            return to_target_ids(params.drafter, greedy_tokens(logits))
        return context.sample(to_target_vocabulary(params.drafter, logits, config), positions)

    def draft_chain(
        params: ModelParams, kv: jax.Array, context: DraftContext
    ) -> tuple[DraftBlock, jax.Array]:
        block, carry = context.block, context.carry
        hidden = carry.hidden_states[:, None]
        # The relayed draft is the likeliest. What a sampling row draws depends on its parameters,
        # which the ingest does not know: it is drawn here, with the noise that the target will
        # draw with, from the relayed hidden state projected again.
        if context.greedy:
            token = carry.topk_index
        else:
            normed = network.norm(params, hidden)
            token = next_tokens(params, normed, context, block.positions[:, 1:2])
        tokens = [block.token_ids[:, :1], token]
        for step in range(1, num_draft_tokens):
            before = slice(step - 1, step)
            row = block.replace(
                token_ids=token,
                positions=block.positions[:, before],
                kv_locs=block.kv_locs[:, before],
                lens=block.lens + (step - 1),
            )
            (hidden, normed), kv = network.forward(params, kv, hidden, token, row)
            token = next_tokens(params, normed, context, block.positions[:, step + 1 : step + 2])
            tokens.append(token)
        count = jnp.full_like(context.rows, num_draft_tokens)
        return DraftBlock(jnp.concatenate(tokens, axis=1), count), kv

    def ingest(
        params: ModelParams, kv: jax.Array, batch: IngestBatch
    ) -> tuple[jax.Array, EagleCarry]:
        hidden = project_features(params.drafter, batch.features, config)
        outputs, kv = network.forward(params, kv, hidden, batch.next_ids, batch.block)
        # A frozen or padding row has no valid position; what it relays is never read.
        last = jnp.maximum(batch.num_valid - 1, 0)
        hidden, normed = (
            jnp.take_along_axis(each, last[:, None, None], axis=1) for each in outputs
        )
        logits = network.logits(params, normed)
        if tree is None:
            best = to_target_ids(params.drafter, greedy_tokens(logits))
            return kv, EagleCarry(highest_probability(logits), best, hidden[:, 0])
        log_probs, best = best_tokens(logits[:, 0], num_first)
        best = to_target_ids(params.drafter, best)
        return kv, EagleCarry(jnp.exp(log_probs), best, hidden[:, 0])

    return Drafter(
        name="eagle3" if config.has_taps else "eagle",
        num_draft_tokens=num_draft_tokens if tree is None else tree.num_nodes - 1,
        feature_layers=config.feature_layers,
        mask_token_id=0,
        init_state=init_state,
        init_carry=init_carry,
        draft=draft_chain if tree is None else build_tree_draft(network, config, tree),
        ingest=ingest,
        kv_lookahead=1,
        depth=None if tree is None else tree.depth,
    )
