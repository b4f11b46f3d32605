"""The network of an EAGLE drafter: one decoder layer over features and the tokens behind them.

`eagle.py` drafts chains with it and `eagle_tree.py` trees; training unrolls the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import ModelParams
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models.base import Block, Kernels, Target
from jaxspec.models.layers import (
    LayerSpec,
    add_and_norm,
    attention,
    embed_tokens,
    linear,
    logits_of,
    may_launch_early,
    plan_attention,
    rms_norm,
    rope_inv_freq,
    swiglu,
    whole,
)


class Outputs(NamedTuple):
    """What a pass leaves, [B, N, E] each: what the next pass reads, and what the head reads."""

    hidden: jax.Array
    normed: jax.Array


class Network(NamedTuple):
    """An EAGLE layer as pure functions.

    forward: (params, kv, hidden, token_ids, block) -> (outputs, kv): from features or own hidden
        states [B, N, E] and the tokens after them to the next outputs.
    norm: (params, hidden) -> normed, of a hidden state that was relayed without.
    logits: (params, normed [B, N, E]) -> f32[B, N, V_draft].
    """

    forward: Callable[
        [ModelParams, jax.Array, jax.Array, jax.Array, Block], tuple[Outputs, jax.Array]
    ]
    norm: Callable[[ModelParams, jax.Array], jax.Array]
    logits: Callable[[ModelParams, jax.Array], jax.Array]


def build_network(
    config: EagleConfig, target: Target, *, kernels: Kernels, draft_window: int | None
) -> Network:
    """Builds the layer; target: whose embedding and head serve where the checkpoint has none."""
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    windows = [window for window in (config.window, draft_window) if window is not None]
    spec = LayerSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        window=min(windows, default=None),
    )

    def forward(
        params: ModelParams, kv: jax.Array, hidden: jax.Array, token_ids: jax.Array, block: Block
    ) -> tuple[Outputs, jax.Array]:
        own = params.drafter
        embeds = (
            target.embed(params.target, token_ids)
            if own.embed is None
            else embed_tokens(own.embed, token_ids)
        )
        x, residual = layer_input(own, embeds, hidden, config)
        plan = plan_attention(x, kv, block, spec, kernels)
        # In a tree XLA pads the queries, and without a norm behind it XLA adds what the MLP gives:
        # neither may be launched early.
        early = may_launch_early(x, own.layer, plan, kernels)
        early_attention = early and block.mask is None
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
            plan=plan,
            early_launch=early_attention,
        )
        eps = config.rms_norm_eps
        x, normed = add_and_norm(residual, attended, own.post_norm, None, eps, kernels, early)
        with jax.named_scope("mlp"):
            added = swiglu(
                normed, own.layer, kernels=kernels, early_launch=early and own.norm is not None
            )
        if own.norm is None:
            x = x + whole(added, x)
            return Outputs(x, x), kv
        x, normed = add_and_norm(x, added, own.norm, None, eps, kernels, False)
        return Outputs(normed if config.norm_output else x, normed), kv

    def norm(params: ModelParams, hidden: jax.Array) -> jax.Array:
        weight = params.drafter.norm
        if weight is None or config.norm_output:
            return hidden
        return rms_norm(hidden, weight, config.rms_norm_eps)

    def logits(params: ModelParams, normed: jax.Array) -> jax.Array:
        head = params.drafter.lm_head
        if head is None:
            return target.logits(params.target, normed)
        return logits_of(normed, head)

    return Network(forward, norm, logits)


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
