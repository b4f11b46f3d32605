"""The EAGLE-3 drafter as it is trained: chains of drafts from many tokens of a row, uncached.

The same function as `drafters.eagle`, which drafts one chain a request over paged KV. Training
unrolls what serving will do, "training-time test" (EAGLE-3, arXiv 2503.01840): the first output of
a chain comes from the target's features, the others from the drafter's own outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_network import layer_input, project_features
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models.layers import (
    LayerParams,
    TargetParams,
    embed_tokens,
    linear,
    rms_norm,
    rope_inv_freq,
    swiglu,
)
from jaxspec.training.anchors import Anchors, TokenRows
from jaxspec.training.attention import Context
from jaxspec.training.target import causal_mask
from kernels_pallas.kv_write.reference import rotate

_STD = 0.02  # of new matrices, as Hugging Face models have it
_HIDDEN = -1e30


@flax.struct.dataclass
class EagleTarget:
    """What a step reads and never changes.

    target_ids: i32[V_draft] the target's id of each draft id, ascending.
    """

    params: TargetParams
    target_ids: jax.Array


def init_params(config: EagleConfig, key: jax.Array, target: EagleTarget) -> EagleParams:
    """Draws a drafter's weights in float32; its head and the norm before it begin as the target's.

    The embedding stays the target's.
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    qkv_rows = heads + 2 * config.num_kv_heads * config.head_dim
    keys = iter(jax.random.split(key, 5))

    def matrix(rows: int, columns: int, std: float = _STD) -> jax.Array:
        return std * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    def ones() -> jax.Array:
        return jnp.ones((width,), jnp.float32)

    return EagleParams(
        layer=LayerParams(
            qkv=matrix(qkv_rows, config.input_size),
            o=matrix(width, heads, _STD * 2**-0.5),
            gate_up=matrix(2 * inner, width),
            down=matrix(width, inner, _STD * 2**-0.5),
        ),
        post_norm=ones(),
        fc=matrix(width, config.fc_size),
        input_norm=ones(),
        hidden_norm=ones(),
        norm=jnp.array(target.params.final_norm, jnp.float32),
        lm_head=target.params.head[target.target_ids].astype(jnp.float32),
    )


class _Rows(NamedTuple):
    """Queries, keys and values of some rows: [R, n, H or J, D], and their residual stream."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    residual: jax.Array


def chain_hidden(
    params: EagleParams,
    config: EagleConfig,
    features: jax.Array,
    embed: jax.Array,
    rows: TokenRows,
    anchors: Anchors,
    drafted: jax.Array,
) -> jax.Array:
    """What the drafter's head reads for each draft of the chains behind the anchors.

    An anchor is a bonus token: the row before it holds the last features, and its token is the last
    that is known. Draft k of the chain at anchor a is the token a + k; to draft it the layer reads
    token a + k - 1 and what it put out for draft k - 1, stands at position a + k - 2 and sees the
    rows before the anchor and its own chain.

    Args:
        params: the drafter's weights, in the dtype to compute in.
        config: sizes.
        features: [R, S, F * E_target] of the row's tokens.
        embed: [V, E], the target's.
        rows: tokens, segments and positions.
        anchors: where the chains begin.
        drafted: i32[R, A, K] the tokens that are drafted; the last one is not read.

    Returns:
        [R, A, K, E], after the drafter's norm.
    """
    inv_freq = jnp.asarray(rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling))

    def project(hidden: jax.Array, token_ids: jax.Array, positions: jax.Array) -> _Rows:
        x, residual = layer_input(params, embed_tokens(embed, token_ids), hidden, config)
        heads = linear(x, params.layer.qkv).reshape(*x.shape[:2], -1, config.head_dim)
        first = config.num_heads
        q, k, v = jnp.split(heads, [first, first + config.num_kv_heads], axis=2)
        q, k = (rotate(part, positions, inv_freq).astype(x.dtype) for part in (q, k))
        return _Rows(q, k, v, residual)

    def output(own: _Rows, attended: jax.Array) -> jax.Array:
        x = own.residual + linear(attended.reshape(*attended.shape[:2], -1), params.layer.o)
        return x + swiglu(rms_norm(x, params.post_norm, config.rms_norm_eps), params.layer)

    @jax.checkpoint  # scores are large and cheap to make again
    def from_features(own: _Rows) -> jax.Array:
        mask = causal_mask(rows.segments)
        return output(own, jax.nn.dot_product_attention(own.q, own.k, own.v, mask=mask))

    @jax.checkpoint
    def from_outputs(own: _Rows, chain: Context) -> jax.Array:
        return output(own, _attend(own.q, context, chain, visible, config))

    following = jnp.roll(rows.token_ids, -1, axis=1)
    known = project(project_features(params, features, config), following, rows.positions)
    context = Context(known.k, known.v)
    last = jnp.maximum(anchors.index - 1, 0)
    own_segment = jnp.take_along_axis(rows.segments, last, axis=1)[:, :, None]
    columns = jnp.arange(rows.segments.shape[1], dtype=jnp.int32)[None, None]
    visible = (columns <= last[:, :, None]) & (rows.segments[:, None] == own_segment)

    hidden = jnp.take_along_axis(from_features(known), last[:, :, None], axis=1)
    start = jnp.take_along_axis(rows.positions, last, axis=1)
    outputs, keys, values = [hidden], [], []
    for step in range(1, drafted.shape[2]):
        own = project(hidden, drafted[:, :, step - 1], start + step)
        keys.append(own.k)
        values.append(own.v)
        hidden = from_outputs(own, Context(jnp.stack(keys, 2), jnp.stack(values, 2)))
        outputs.append(hidden)
    return rms_norm(jnp.stack(outputs, axis=2), params.norm, config.rms_norm_eps)


def _attend(
    q: jax.Array, context: Context, chain: Context, visible: jax.Array, config: EagleConfig
) -> jax.Array:
    """One softmax over the rows before the anchor and the chain so far.

    q: [R, A, H, D]. chain: [R, A, n, J, D]. visible: bool[R, A, S]. Returns [R, A, H, D].
    """
    kv_heads = config.num_kv_heads
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, config.head_dim)
    grouped = grouped * jnp.asarray(config.head_dim**-0.5, q.dtype)
    dots = {"preferred_element_type": jnp.float32}
    far = jnp.einsum("rajgd,rsjd->rajgs", grouped, context.k, **dots)
    far = jnp.where(visible[:, :, None, None], far, _HIDDEN)
    near = jnp.einsum("rajgd,ranjd->rajgn", grouped, chain.k, **dots)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(q.dtype)
    far, near = jnp.split(weights, [context.k.shape[1]], axis=-1)
    out = jnp.einsum("rajgs,rsjd->rajgd", far, context.v, **dots)
    out += jnp.einsum("rajgn,ranjd->rajgd", near, chain.v, **dots)
    return out.astype(q.dtype).reshape(q.shape)
