"""Multi-layer EAGLE (multi-token prediction): draft i comes from layer i, all of them at ingest.

Row j of layer i is made from a hidden state of position j and the token at j + 1 + i, stands at
position j and predicts the token at j + 2 + i. In a chain the hidden state is what layer i - 1 made
of row j, else all layers read the target's feature. So all drafts come from one sweep through the
layers over the committed rows: after each layer the tokens move one to the left, and what the layer
drafted enters behind them. `draft` only lays out what was relayed.

The last i rows of layer i were made with drafts in place of tokens that did not exist yet. Their KV
is made again at the next ingest, whose window therefore begins as many rows early as there are
layers behind the first; the features and tokens of those rows are kept per slot.

Example with 3 layers: tokens 0..6 are known, 6 is the bonus token, rows 0..5 have features. Row 5
reads token 6 in layer 0, draft 7 in layer 1, draft 8 in layer 2; row 4 reads token 6 in layer 1 and
draft 7 in layer 2. If the next step commits tokens 7 and 8 (rows 6 and 7), its window is rows 4..7.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2) and SGLang's multi-layer EAGLE worker, whose
"boundary KV fix" this window is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError
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
from jaxspec.drafters.boundary import Boundary, init_boundary, widen
from jaxspec.drafters.eagle import EagleCarry
from jaxspec.drafters.eagle_network import highest_probability
from jaxspec.drafters.multi_layer_eagle_checkpoint import load_multi_layer_eagle
from jaxspec.drafters.multi_layer_eagle_config import MultiLayerEagleConfig
from jaxspec.future_map import token_dtype
from jaxspec.models.base import KV, Kernels, Target
from jaxspec.models.layers import LayerSpec, decoder_layer, linear, rms_norm, rope_inv_freq
from jaxspec.sampling import greedy_tokens


class State(NamedTuple):
    """kv: one array a layer, each with rows of its own. boundary: see there."""

    kv: KV
    boundary: Boundary


def plan_multi_layer_eagle(setup: DrafterSetup) -> DrafterPlan:
    """Loads a multi-layer EAGLE checkpoint and checks it against the target and the settings.

    Raises:
        ModelFileError: the checkpoint is unfit for the target.
        ConfigError: the block size does not suit the checkpoint.
    """
    config, params = load_multi_layer_eagle(setup.checkpoint, setup.target, setup.dtype)
    block_size = setup.config.block_size or config.num_layers + 1
    try:
        _check(config, block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def build(target: Target, page_size: int, kernels: Kernels) -> Drafter:
        return build_multi_layer_eagle(
            config,
            target,
            block_size=block_size,
            page_size=page_size,
            dtype=jnp.dtype(setup.dtype),
            kernels=kernels,
            draft_window=setup.config.draft_window,
        )

    kv_bytes, shapes = kv_and_shapes(config, block_size - 1, setup.dtype)
    return DrafterPlan(params, (config.feature_layer,), block_size, kv_bytes, shapes, build)


@functools.lru_cache(maxsize=64)
def build_multi_layer_eagle(
    config: MultiLayerEagleConfig,
    target: Target,
    *,
    block_size: int,
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
    draft_window: int | None = None,
) -> Drafter:
    """Builds the pure functions of the drafter; equal arguments give the same `Drafter`.

    Args:
        config: sizes, and whether the layers are a chain.
        target: whose embedding and head it borrows.
        block_size: N, the bonus token and a draft of each of the first N - 1 layers.
        page_size: G, as the target's KV.
        dtype: of parameters, activations and KV, as the target's.
        kernels: the implementation of each op.
        draft_window: positions that each layer looks back over at most; None leaves them all.

    Raises:
        ValueError: a block without room for a draft, or with more drafts than layers.
    """
    _check(config, block_size)
    num_draft_tokens = block_size - 1
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    spec = LayerSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        window=draft_window,
    )

    def init_state(num_pages: int, num_slots: int, max_len: int) -> State:
        shape = (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
        return State(
            kv=tuple(jnp.zeros(shape, dtype) for _ in range(num_draft_tokens)),
            boundary=init_boundary(num_slots, num_draft_tokens - 1, config.hidden_size, dtype),
        )

    def init_carry(num_slots: int) -> EagleCarry:
        shape = (num_slots + 1, num_draft_tokens)
        return EagleCarry(
            topk_p=jnp.zeros(shape, jnp.float32),
            topk_index=jnp.zeros(shape, token_dtype()),
            hidden_states=jnp.zeros((*shape, config.hidden_size), dtype),
        )

    def draft_logits(params: ModelParams, outputs: jax.Array, norms: jax.Array) -> jax.Array:
        """Outputs [B, n, E] of n layers and their norms [n, E] -> f32[B, n, V]."""
        normed = jax.vmap(rms_norm, (1, 0, None), 1)(outputs, norms, config.rms_norm_eps)
        return target.logits(params.target, normed)

    def draft(params: ModelParams, state: State, context: DraftContext) -> tuple[DraftBlock, State]:
        block, carry = context.block, context.carry
        drafts = carry.topk_index
        if not context.greedy:
            # Each draft is drawn as if those before it were the likeliest, which the layers read:
            # one that is not costs the drafts behind it, while the likeliest alone would cost all.
            logits = draft_logits(
                params, carry.hidden_states, params.drafter.norms[:num_draft_tokens]
            )
            drafts = context.sample(logits, block.positions[:, 1:])
        tokens = jnp.concatenate([block.token_ids[:, :1], drafts], axis=1)
        return DraftBlock(tokens, jnp.full_like(context.rows, num_draft_tokens)), state

    def ingest(params: ModelParams, state: State, batch: IngestBatch) -> tuple[State, EagleCarry]:
        own = params.drafter
        window, boundary = widen(state.boundary, batch, page_size)
        last = jnp.maximum(window.num_valid - 1, 0)[:, None]
        column = jnp.arange(window.next_ids.shape[1], dtype=jnp.int32)[None, :]
        ids, hidden = window.next_ids, window.features
        pages, carries = [], []
        for index in range(num_draft_tokens):
            embeds = target.embed(params.target, ids)
            mixed = jnp.concatenate(
                [
                    rms_norm(embeds, own.embed_norms[index], config.rms_norm_eps),
                    rms_norm(hidden, own.hidden_norms[index], config.rms_norm_eps),
                ],
                axis=-1,
            )
            x, layer_pages = decoder_layer(
                linear(mixed, own.mixes[index]),
                state.kv[index],
                window.block,
                own,
                index,
                inv_freq=jnp.asarray(inv_freq),
                spec=spec,
                kernels=kernels,
            )
            pages.append(layer_pages)
            output = jnp.take_along_axis(x, last[:, :, None], axis=1)
            logits = draft_logits(params, output, own.norms[index : index + 1])
            token = greedy_tokens(logits)
            carries.append(EagleCarry(highest_probability(logits), token, output))
            ids = jnp.where(column == last, token, jnp.roll(ids, -1, axis=1))
            hidden = x if config.is_chain else hidden
        carry = EagleCarry(
            *(jnp.concatenate(leaves, axis=1) for leaves in zip(*carries, strict=True))
        )
        return State(tuple(pages), boundary), carry

    return Drafter(
        name="multi_layer_eagle",
        num_draft_tokens=num_draft_tokens,
        feature_layers=(config.feature_layer,),
        mask_token_id=0,
        init_state=init_state,
        init_carry=init_carry,
        draft=draft,
        ingest=ingest,
        kv_lookahead=num_draft_tokens,
        min_ingest=num_draft_tokens - 1,
    )


def _check(config: MultiLayerEagleConfig, block_size: int) -> None:
    if not 2 <= block_size <= config.num_layers + 1:
        raise ValueError(
            f"block size {block_size} is not possible: the drafter has {config.num_layers} layers, "
            f"one a draft; use 2 to {config.num_layers + 1}"
        )
