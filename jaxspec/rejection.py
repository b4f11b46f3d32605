"""Classical rejection sampling: drafts are accepted by how much the target likes them.

The text is distributed as the target's, but, unlike with keyed noise, depends on the drafts: on
the drafter, on where blocks begin, and so on preemption. In return more drafts are accepted: a
draft from q with probability 1 - TV(p, q), the most that is possible.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.sampling import fold_positions, greedy_tokens

_ACCEPT, _RESIDUAL = 1, 2  # streams of a position's noise; drafts are drawn from the position's own


def rejection_choice(
    log_p: jax.Array,
    log_q: jax.Array | None,
    drafts: jax.Array,
    num_drafts: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The target's choice at each position: the draft where it is accepted, else another token.

    A draft x is accepted where u q(x) < p(x), u uniform in [0, 1), strictly, so that a token of
    p(x) = 0 never is; else a token is drawn from the normalised max(p - q, 0), which gives x no
    weight (arXiv 2211.17192, 2302.01318). Where nothing was drafted a token is drawn from p.

    log_p: f32[B, N, V] of the target, -inf where p is 0. log_q: f32[B, N - 1, V] that the drafts
    were drawn from; None where each was certain. drafts: [B, N - 1]. num_drafts: i32[B] how many
    of them are meant. keys: u32[B, 2]. positions: i32[B, N] of the tokens to choose.
    Returns token_dtype[B, N].
    """
    p = jnp.exp(log_p)
    ids = drafts.astype(jnp.int32)[..., None]
    if log_q is None:
        q = jax.nn.one_hot(ids[..., 0], p.shape[-1], dtype=jnp.float32)
    else:
        q = jnp.exp(log_q)
    column = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    meant = column < num_drafts[:, None]
    q = jnp.where(meant[..., None], q, 0.0)
    coins = _uniform(keys, positions[:, :-1])
    p_of_draft = jnp.take_along_axis(p[:, :-1], ids, axis=-1)[..., 0]
    q_of_draft = jnp.take_along_axis(q, ids, axis=-1)[..., 0]
    accepted = meant & (coins * q_of_draft < p_of_draft)
    residual = jnp.maximum(p.at[:, :-1].add(-q), 0.0)
    # p = q leaves nothing but rounding; then nothing is rejected either, but for rounding.
    is_empty = residual.sum(-1, keepdims=True) <= 0.0
    residual = jnp.where(is_empty, p, residual)
    noise = _residual_noise(keys, positions, p.shape[-1])
    others = greedy_tokens(jnp.where(residual > 0.0, jnp.log(residual) + noise, -jnp.inf))
    chosen = jnp.where(accepted, drafts.astype(others.dtype), others[:, :-1])
    return others.at[:, :-1].set(chosen)


def _uniform(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """f32[B, K] in [0, 1)."""

    def of_key(key: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, _ACCEPT), (), jnp.float32)

    return fold_positions(keys, positions, of_key)


def _residual_noise(keys: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise f32[B, N, V], not that of drafts."""

    def of_key(key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, _RESIDUAL)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return fold_positions(keys, positions, of_key)
