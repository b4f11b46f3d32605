"""EAGLE: one decoder layer that goes on from the target's features, a token a pass.

Row j of the drafter is made from the feature of position j and the token at j + 1, stands at
position j and predicts the token at j + 2. Its KV lies in pages of its own under the target's page
ids. `ingest` makes the rows whose features the target has just computed; the last of them predicts
the first draft, which is relayed. `draft` goes on from there with the drafter's own outputs in
place of features: K drafts take K - 1 passes, whose rows lie behind seq_len, where the rows of
committed tokens later overwrite them.

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
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.future_map import token_dtype
from jaxspec.models.base import Block, Kernels, Target
from jaxspec.models.layers import (
    LayerSpec,
    attention,
    embed_tokens,
    linear,
    logits_of,
    rms_norm,
    rope_inv_freq,
    swiglu,
)
from jaxspec.sampling import greedy_tokens

DEFAULT_BLOCK_SIZE = 6  # five drafts; a sixth is rarely right and costs a pass as any other


class EagleCarry(NamedTuple):
    """What the ingest relays to the next draft, a row a request.

    topk_p: f32[B, 1] the drafter's probability of its first draft. topk_index: token_dtype[B, 1]
    that draft, an id of the target. hidden_states: [B, E] what the next pass reads in place of a
    feature, and what a batch with sampling rows draws its first draft from.
    """

    topk_p: jax.Array
    topk_index: jax.Array
    hidden_states: jax.Array


def plan_eagle(setup: DrafterSetup) -> DrafterPlan:
    """Loads an EAGLE checkpoint and checks it against the target and the settings.

    Raises:
        ModelFileError: the checkpoint is unfit for the target.
    """
    config, params = load_eagle(setup.checkpoint, setup.target, setup.dtype)
    block_size = setup.config.block_size or DEFAULT_BLOCK_SIZE

    def build(target: Target, page_size: int, kernels: Kernels) -> Drafter:
        return build_eagle(
            config,
            target,
            block_size=block_size,
            page_size=page_size,
            dtype=jnp.dtype(setup.dtype),
            kernels=kernels,
            draft_window=setup.config.draft_window,
        )

    kv_bytes, shapes = kv_and_shapes(config, 1, setup.dtype)
    return DrafterPlan(params, config.feature_layers, block_size, kv_bytes, shapes, build)


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

    Raises:
        ValueError: a block without room for a draft.
    """
    if block_size < 2:
        raise ValueError(f"block size {block_size} leaves no room for a draft; use 2 or more")
    num_draft_tokens = block_size - 1
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    windows = [window for window in (config.window, draft_window) if window is not None]
    spec = LayerSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        window=min(windows, default=None),
    )

    def init_state(num_pages: int, num_slots: int, max_len: int) -> jax.Array:
        return jnp.zeros((num_pages, 2, config.num_kv_heads, page_size, config.head_dim), dtype)

    def init_carry(num_slots: int) -> EagleCarry:
        return EagleCarry(
            topk_p=jnp.zeros((num_slots + 1, 1), jnp.float32),
            topk_index=jnp.zeros((num_slots + 1, 1), token_dtype()),
            hidden_states=jnp.zeros((num_slots + 1, config.hidden_size), dtype),
        )

    def forward(
        params: ModelParams, kv: jax.Array, hidden: jax.Array, token_ids: jax.Array, block: Block
    ) -> tuple[jax.Array, jax.Array]:
        """(features or own outputs [B, N, E], tokens after them) -> (outputs [B, N, E], kv)."""
        own = params.drafter
        embeds = (
            target.embed(params.target, token_ids)
            if own.embed is None
            else embed_tokens(own.embed, token_ids)
        )
        x, residual = layer_input(own, embeds, hidden, config)
        attended, kv = attention(
            x,
            kv,
            block,
            own.layer,
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            inv_freq=jnp.asarray(inv_freq),
            spec=spec,
            kernels=kernels,
        )
        x = residual + attended
        with jax.named_scope("mlp"):
            x = x + swiglu(
                rms_norm(x, own.post_norm, config.rms_norm_eps),
                own.layer,
                kernels=kernels,
            )
        if config.norm_output:
            x = rms_norm(x, own.norm, config.rms_norm_eps)
        return x, kv

    def draft_logits(params: ModelParams, hidden: jax.Array) -> jax.Array:
        """[B, N, E] as `forward` gives them -> f32[B, N, V_draft]."""
        own = params.drafter
        if own.norm is not None and not config.norm_output:
            hidden = rms_norm(hidden, own.norm, config.rms_norm_eps)
        if own.lm_head is None:
            return target.logits(params.target, hidden)
        return logits_of(hidden, own.lm_head)

    def next_tokens(
        params: ModelParams, hidden: jax.Array, context: DraftContext, positions: jax.Array
    ) -> jax.Array:
        """The drafts at positions i32[B, 1], from [B, 1, E]: token_dtype[B, 1]."""
        logits = draft_logits(params, hidden)
        if context.greedy:
            return to_target_ids(params.drafter, greedy_tokens(logits))
        return context.sample(to_target_vocabulary(params.drafter, logits, config), positions)

    def draft(
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
            token = next_tokens(params, hidden, context, block.positions[:, 1:2])
        tokens = [block.token_ids[:, :1], token]
        for step in range(1, num_draft_tokens):
            before = slice(step - 1, step)
            row = block.replace(
                token_ids=token,
                positions=block.positions[:, before],
                kv_locs=block.kv_locs[:, before],
                lens=block.lens + (step - 1),
            )
            hidden, kv = forward(params, kv, hidden, token, row)
            token = next_tokens(params, hidden, context, block.positions[:, step + 1 : step + 2])
            tokens.append(token)
        count = jnp.full_like(context.rows, num_draft_tokens)
        return DraftBlock(jnp.concatenate(tokens, axis=1), count), kv

    def ingest(
        params: ModelParams, kv: jax.Array, batch: IngestBatch
    ) -> tuple[jax.Array, EagleCarry]:
        hidden = project_features(params.drafter, batch.features, config)
        hidden, kv = forward(params, kv, hidden, batch.next_ids, batch.block)
        # A frozen or padding row has no valid position; what it relays is never read.
        last = jnp.maximum(batch.num_valid - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        logits = draft_logits(params, hidden)
        best = to_target_ids(params.drafter, greedy_tokens(logits))
        return kv, EagleCarry(highest_probability(logits), best, hidden[:, 0])

    return Drafter(
        name="eagle3" if config.has_taps else "eagle",
        num_draft_tokens=num_draft_tokens,
        feature_layers=config.feature_layers,
        mask_token_id=0,
        init_state=init_state,
        init_carry=init_carry,
        draft=draft,
        ingest=ingest,
        kv_lookahead=1,
    )


def project_features(params: EagleParams, features: jax.Array, config: EagleConfig) -> jax.Array:
    """Brings the target's features to the drafter's width: [B, N, F * E_target] -> [B, N, E].

    EAGLE-1 and 2 take the one feature as it is.
    """
    if not config.has_taps:
        return features
    if params.taps_norm is not None:
        features = rms_norm(features, params.taps_norm, config.rms_norm_eps)
    if params.fc_norms is not None:
        taps = jnp.split(features, len(config.feature_layers), axis=-1)
        normed = [
            rms_norm(tap, params.fc_norms[i], config.rms_norm_eps) for i, tap in enumerate(taps)
        ]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params.fc, params.fc_bias)


def layer_input(
    params: EagleParams, embeds: jax.Array, hidden: jax.Array, config: EagleConfig
) -> tuple[jax.Array, jax.Array]:
    """What the layer attends from, [B, N, Z], and its residual stream, [B, N, E].

    EAGLE-3 keeps embedding and hidden state side by side, each normed; EAGLE-1 and 2 mix them by
    `fc` and have no norm before attention.
    """
    if not config.has_taps:
        mixed = linear(jnp.concatenate([embeds, hidden], axis=-1), params.fc, params.fc_bias)
        return mixed, mixed
    normed = rms_norm(hidden, params.hidden_norm, config.rms_norm_eps)
    embeds = rms_norm(embeds, params.input_norm, config.rms_norm_eps)
    residual = normed if config.norm_before_residual else hidden
    return jnp.concatenate([embeds, normed], axis=-1), residual


def to_target_ids(params: EagleParams, draft_ids: jax.Array) -> jax.Array:
    """Maps ids of the draft vocabulary to the target's, token_dtype of any shape."""
    if params.target_ids is None:
        return draft_ids
    return params.target_ids[draft_ids].astype(draft_ids.dtype)


def to_target_vocabulary(params: EagleParams, logits: jax.Array, config: EagleConfig) -> jax.Array:
    """f32[B, N, V_draft] -> f32[B, N, V]; ids outside the draft vocabulary get -inf."""
    if params.target_ids is None:
        return logits
    empty = jnp.full((*logits.shape[:-1], config.vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., params.target_ids].set(logits)


def highest_probability(logits: jax.Array) -> jax.Array:
    """The probability of the likeliest token: f32[..., V] -> f32[...]."""
    return jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))
