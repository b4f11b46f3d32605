"""Parameters and pieces of a dense decoder: products, norms, rotary frequencies, one layer.

Activations are [B, N, ...]; a weight of a matrix product is stored [out, in].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.models.base import KV, Block, Kernels
from jaxspec.models.config import RopeScaling
from kernels_pallas.add_rms_norm import add_rms_norm
from kernels_pallas.few_row_gemm import few_row_gemm, launches_early, parts_for
from kernels_pallas.kv_write import kv_write
from kernels_pallas.paged_attention import Plan, paged_attention, plan_ahead


@flax.struct.dataclass
class LayerParams:
    """The matrices of one decoder layer; its norms are stacked over layers, see `TargetParams`."""

    qkv: jax.Array  # [(H + 2J) * D, E] rows: query heads, key heads, value heads
    o: jax.Array  # [E, H * D]
    gate_up: jax.Array  # [2I, E] rows: gate, up
    down: jax.Array  # [E, I]
    qkv_bias: jax.Array | None = None  # [(H + 2J) * D]
    o_bias: jax.Array | None = None  # [E]


@flax.struct.dataclass
class TargetParams:
    """All weights of a language model. Norms are stacked, since a call costs time per array."""

    embed: jax.Array  # [V, E]
    lm_head: jax.Array | None  # [V, E]; None: the head is `embed`
    final_norm: jax.Array  # [E]
    input_norms: jax.Array  # [L, E]
    post_norms: jax.Array  # [L, E]
    q_norms: jax.Array | None  # [L, D]
    k_norms: jax.Array | None  # [L, D]
    layers: tuple[LayerParams, ...]

    @property
    def head(self) -> jax.Array:
        """The [V, E] matrix that makes logits."""
        return self.embed if self.lm_head is None else self.lm_head


class LayerStack(Protocol):
    """What `decoder_layer` reads: the target's parameters, or a drafter's."""

    input_norms: jax.Array
    post_norms: jax.Array
    q_norms: jax.Array | None
    k_norms: jax.Array | None
    layers: tuple[LayerParams, ...]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The static side of one decoder layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    causal: bool = True
    window: int | None = None  # keys at least this far from a query are not seen


_PLAIN = Kernels()


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kernels: Kernels = _PLAIN,
    early_launch: bool = False,
    in_parts: bool = False,
) -> jax.Array:
    """Multiplies every row by a matrix.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].
        kernels: the implementation of each op; `few_row_gemm` serves as many rows as it takes.
        early_launch: see `kernels_pallas.early_launch`.
        in_parts: whether the result may be in parts, which `add_and_norm` adds up.

    Returns:
        [..., out] in x's dtype, or in parts f32[S, ..., out].
    """
    rows = x.reshape(-1, x.shape[-1])
    outputs, width = weight.shape
    num_parts = parts_for(
        rows.shape[0],
        outputs,
        width,
        may_split=in_parts and bias is None,
        implementation=kernels.few_row_gemm,
    )
    if num_parts:
        y = few_row_gemm(
            rows,
            weight,
            num_parts=num_parts,
            early_launch=early_launch,
            implementation=kernels.few_row_gemm,
        )
    else:
        y = _product(rows, weight, preferred=x.dtype)
    if bias is not None:
        y = y + bias[None]
    return y.reshape(*y.shape[:-2], *x.shape[:-1], outputs)


def logits_of(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Multiplies by the output head and keeps the sums in float32.

    Args:
        hidden: [..., E] after the final norm.
        head: [V, E].

    Returns:
        f32[..., V].
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    y = _product(rows, head, preferred=jnp.float32)
    return y.reshape(*hidden.shape[:-1], head.shape[0])


def _product(rows: jax.Array, weight: jax.Array, *, preferred: jnp.dtype) -> jax.Array:
    """[T, in] times [out, in] -> [T, out]; for few rows on CPU in the order that is fast there."""

    def plain(rows, weight):
        return lax.dot_general(rows, weight, _CONTRACT_LAST, preferred_element_type=preferred)

    def few_rows_on_cpu(rows, weight):
        # Without the barrier XLA turns this into `plain`, whose GEMM packs the whole weight first.
        # Measured over SmolLM2's matrices, 8 rows against 1: 2.0x instead of 2.7x (jax 0.10.2),
        # 1.5x instead of 2.9x (0.11.2); from 200 rows on `plain` is faster.
        y = lax.dot_general(weight, rows, _CONTRACT_LAST, preferred_element_type=preferred)
        return lax.optimization_barrier(y).T

    if rows.shape[0] > _FEW_ROWS:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=few_rows_on_cpu, default=plain)


_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_FEW_ROWS = 128


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scales rows to unit mean square, in float32, and multiplies by a weight.

    Args:
        x: [..., E].
        weight: [E].
        eps: added to the mean square.

    Returns:
        [..., E] in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight32 = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return (x32 * scale * weight32).astype(x.dtype)


def rope_inv_freq(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Makes the rotary frequencies, in float32 throughout as checkpoints' authors had them.

    Args:
        head_dim: D.
        theta: the base of the geometric series.
        scaling: Llama 3's stretching of long wavelengths (config.json of Llama 3.1): those longer
            than original / low_freq_factor are stretched by `factor`, those shorter than
            original / high_freq_factor stay, and between them the two are mixed linearly.

    Returns:
        f32[D / 2] radians a position.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1.0) / np.float32(theta) ** exponents
    if scaling is None:
        return inv_freq
    turns = np.float32(scaling.original_max_position_embeddings) * inv_freq / np.float32(2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0).astype(np.float32)
    return (1.0 - kept) * inv_freq / np.float32(scaling.factor) + kept * inv_freq


def embed_tokens(embed: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Looks up [..., E] rows; an id outside the table reads its nearest row."""
    return embed.at[token_ids].get(mode="clip", wrap_negative_indices=False)


def plan_attention(
    x: jax.Array, kv_pages: jax.Array, block: Block, spec: LayerSpec, kernels: Kernels
) -> Plan | None:
    """What lets a layer's attention ask for KV before q is there, or None where it cannot."""
    if not kernels.early_launch:
        return None
    return plan_ahead(
        jax.ShapeDtypeStruct((*x.shape[:2], spec.num_heads, spec.head_dim), x.dtype),
        kv_pages,
        block.page_table,
        block.lens,
        window=spec.window,
        block_mask=block.mask,
        implementation=kernels.paged_attention,
    )


def may_launch_early(x: jax.Array, layer: LayerParams, plan: Plan | None, kernels: Kernels) -> bool:
    """Whether kernels of a layer may be launched early, for the rows of x, [B, N, ...].

    That is where all its products may be, and of many rows, where its attention asks ahead too.
    """
    inner, hidden = layer.down.shape[1], layer.down.shape[0]
    products = (
        (*layer.qkv.shape, False, False),
        (*layer.o.shape, False, layer.o_bias is None),
        (inner, hidden, True, False),
        (hidden, inner, False, True),
    )
    return kernels.early_launch and all(
        launches_early(
            x.shape[0] * x.shape[1],
            outputs,
            width,
            swiglu=swiglu,
            may_split=may_split,
            attends_ahead=plan is not None,
            implementation=kernels.few_row_gemm,
        )
        for outputs, width, swiglu, may_split in products
    )


def swiglu(
    x: jax.Array, layer: LayerParams, *, kernels: Kernels = _PLAIN, early_launch: bool = False
) -> jax.Array:
    """down(silu(gate(x)) * up(x)): [..., E] -> [..., E], maybe in parts; all else as `linear`."""
    rows, inner = x.reshape(-1, x.shape[-1]), layer.down.shape[1]
    implementation = kernels.few_row_gemm
    if parts_for(len(rows), inner, x.shape[-1], swiglu=True, implementation=implementation):
        y = few_row_gemm(
            rows,
            layer.gate_up,
            swiglu=True,
            early_launch=early_launch,
            implementation=implementation,
        ).reshape(*x.shape[:-1], inner)
    else:
        gate, up = jnp.split(linear(x, layer.gate_up), 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return linear(y, layer.down, kernels=kernels, early_launch=early_launch, in_parts=True)


def attention(
    x: jax.Array,
    kv_pages: jax.Array,
    block: Block,
    layer: LayerParams,
    *,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    inv_freq: jax.Array,
    spec: LayerSpec,
    kernels: Kernels,
    index: jax.Array | None = None,
    plan: Plan | None = None,
    early_launch: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends over a block and the KV before it, writing the block's KV first.

    Args:
        x: [B, N, in] what q, k and v are projected from.
        kv_pages: [P, 2, J, G, D] of this layer, updated in place when donated.
        block: where the tokens are and what they may see.
        layer: the matrices.
        q_norm, k_norm: [D], or [L, D] with `index`, or None for no norm of the heads.
        inv_freq: f32[D / 2].
        spec: sizes, causality and window.
        kernels: the implementation of each op.
        index: i32[1] the layer, where norms are those of all layers.
        plan: what `plan_attention` made of the same, or None.
        early_launch: see `kernels_pallas.early_launch`.

    Returns:
        What is added to the residual stream, [B, N, E] or in parts f32[S, B, N, E], and the pages.
    """
    with jax.named_scope("attention"):
        kv_locs = block.kv_locs
        if plan is not None:
            # Attention reads it while `kv_write` still runs, so it must be there before that.
            kv_locs, plan = lax.optimization_barrier((kv_locs, plan))
        q, kv_pages = kv_write(
            # A bias is added by a fusion of XLA's, which must not be launched early.
            linear(
                x,
                layer.qkv,
                layer.qkv_bias,
                kernels=kernels,
                early_launch=early_launch and layer.qkv_bias is None,
            ),
            kv_pages,
            kv_locs,
            block.positions,
            inv_freq,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            layer=index,
            eps=spec.rms_norm_eps,
            early_launch=early_launch or plan is not None,
            implementation=kernels.kv_write,
        )
        num_others = 0 if block.mask is None else block.mask.shape[1] - q.shape[1]
        if num_others:  # the mask counts rows before the block's own, which ask for nothing
            q = jnp.pad(q, ((0, 0), (num_others, 0), (0, 0), (0, 0)))
        attended = paged_attention(
            q,
            kv_pages,
            block.page_table,
            block.lens,
            causal=spec.causal,
            window=spec.window,
            block_mask=block.mask,
            plan=plan,
            early_launch=early_launch,
            implementation=kernels.paged_attention,
        )[:, num_others:]
        out = linear(
            attended.reshape(*x.shape[:-1], -1),
            layer.o,
            layer.o_bias,
            kernels=kernels,
            early_launch=early_launch and layer.o_bias is None,
            in_parts=True,
        )
    return out, kv_pages


class LayersOutput(NamedTuple):
    """What a stack of layers leaves behind."""

    hidden: jax.Array  # [B, N, E] after the final norm
    outputs: tuple[jax.Array, ...]  # [B, N, E] the residual stream after each layer
    kv: KV


def decoder_layers(
    x: jax.Array,
    kv: KV,
    block: Block,
    stack: LayerStack,
    final_norm: jax.Array,
    *,
    inv_freq: jax.Array,
    specs: Sequence[LayerSpec],
    kernels: Kernels,
    outputs: Sequence[int] = (),
) -> LayersOutput:
    """Runs pre-norm decoder layers over a block, each writing the block's KV before attending.

    What a sublayer adds to the residual stream is added where the next one norms it: one launch.

    Args:
        x: [B, N, E] residual stream.
        kv: pages of each layer, updated in place when donated.
        block: where the tokens are and what they may see.
        stack: parameters of all layers.
        final_norm: [E] weight of the norm after the last layer.
        inv_freq: f32[D / 2].
        specs: sizes, causality and window of each layer.
        kernels: the implementation of each op.
        outputs: the layers whose residual stream the caller reads.
    """
    streams, pages = [], []
    added = None
    for index, (layer_pages, spec) in enumerate(zip(kv, specs, strict=True)):
        entered, x, added, layer_pages = _layer(
            x,
            added,
            layer_pages,
            block,
            stack.layers[index],
            _norms_of(stack),
            jnp.full((1,), index, jnp.int32),
            inv_freq,
            spec=spec,
            kernels=kernels,
            is_read=index - 1 in outputs,
        )
        streams.append(entered)
        pages.append(layer_pages)
    assert added is not None, "a model has layers"
    # Read by the head, which may be a fusion of XLA's: not early.
    last, hidden = add_and_norm(x, added, final_norm, None, specs[-1].rms_norm_eps, kernels, False)
    return LayersOutput(hidden, (*streams[1:], last), tuple(pages))


def decoder_layer(
    x: jax.Array,
    kv_pages: jax.Array,
    block: Block,
    stack: LayerStack,
    index: int,
    *,
    inv_freq: jax.Array,
    spec: LayerSpec,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """One layer of `decoder_layers`: the residual stream after it, [B, N, E], and its pages."""
    _, x, added, kv_pages = _layer(
        x,
        None,
        kv_pages,
        block,
        stack.layers[index],
        _norms_of(stack),
        jnp.full((1,), index, jnp.int32),
        inv_freq,
        spec=spec,
        kernels=dataclasses.replace(kernels, early_launch=False),
        is_read=True,
    )
    return x + whole(added, x), kv_pages


def _norms_of(stack: LayerStack) -> tuple[jax.Array | None, ...]:
    return stack.input_norms, stack.post_norms, stack.q_norms, stack.k_norms


# A jit of its own, so that layers of one shape are traced and lowered once, not L times.
@functools.partial(jax.jit, static_argnames=("spec", "kernels", "is_read"))
def _layer(x, added, kv_pages, block, layer, norms, index, inv_freq, *, spec, kernels, is_read):
    """(stream at entry, stream after attention, what the MLP adds to it, pages).

    What the MLP adds may be in parts, f32[S, B, N, E].

    norms: of all layers, index: i32[1] which is this one. is_read: the stream at entry is.
    """
    input_norms, post_norms, q_norms, k_norms = norms
    eps = spec.rms_norm_eps
    plan = plan_attention(x, kv_pages, block, spec, kernels)
    early = may_launch_early(x, layer, plan, kernels)
    if added is None:
        normed = rms_norm(x, input_norms[index[0]], eps)
    else:
        x, normed = add_and_norm(x, added, input_norms, index, eps, kernels, early and not is_read)
    entered = x
    attended, kv_pages = attention(
        normed,
        kv_pages,
        block,
        layer,
        q_norm=q_norms,
        k_norm=k_norms,
        inv_freq=inv_freq,
        spec=spec,
        kernels=kernels,
        index=index,
        plan=plan,
        early_launch=early,
    )
    x, normed = add_and_norm(x, attended, post_norms, index, eps, kernels, early)
    with jax.named_scope("mlp"):
        added = swiglu(normed, layer, kernels=kernels, early_launch=early)
    return entered, x, added, kv_pages


def whole(added: jax.Array, like: jax.Array) -> jax.Array:
    """Parts of what is added summed up; what is whole as it is."""
    return added if added.ndim == like.ndim else added.sum(axis=0).astype(like.dtype)


def add_and_norm(
    x: jax.Array,
    added: jax.Array,
    weight: jax.Array,
    index: jax.Array | None,
    eps: float,
    kernels: Kernels,
    early_launch: bool,
) -> tuple[jax.Array, jax.Array]:
    """(x + added, its norm), [B, N, E] each.

    added: [B, N, E], or parts of it f32[S, B, N, E].
    weight: [E], or of all layers [L, E] with index i32[1] of this one.
    """
    width = x.shape[-1]
    results = add_rms_norm(
        x.reshape(-1, width),
        added.reshape(*added.shape[:-3], -1, width),
        weight,
        index,
        eps=eps,
        early_launch=early_launch,
        implementation=kernels.add_rms_norm,
    )
    return tuple(result.reshape(x.shape) for result in results)
