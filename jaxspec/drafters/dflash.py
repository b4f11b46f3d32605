"""DFlash: a whole block of drafts in one pass of a small network that reads the target's features.

The drafter keeps KV of its own, one array a layer, under the target's page ids. A committed token
enters it as a *context* row, made from the target's features (`ingest`); the block being drafted,
a bonus token and masks, lies behind it as scratch rows that later context overwrites (`draft`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, EngineConfig
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
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import ContextParams, DFlashParams
from jaxspec.drafters.tree import (
    TreeShape,
    best_first,
    best_tokens,
    keep_best,
    num_best_first,
    tree_shape,
)
from jaxspec.models.base import KV, Kernels, Target
from jaxspec.models.layers import (
    LayerSpec,
    decoder_layers,
    linear,
    rms_norm,
    rope_inv_freq,
)
from jaxspec.weights.load import load_dflash
from kernels_pallas.kv_write_context import kv_write_context

# The likeliest tokens of a position that a tree branches over. Of trees of 64 the 16th is hardly
# ever one, and more than 16 are found by sorting the vocabulary (XLA's TopK on GPUs).
_TREE_WIDTH = 16


def plan_dflash(setup: DrafterSetup) -> DrafterPlan:
    """Loads a DFlash checkpoint and checks it against the target and the settings.

    Raises:
        ModelFileError: the checkpoint is unfit for the target.
        ConfigError: the block size or the draft window does not suit the checkpoint.
    """
    config, params = load_dflash(
        setup.checkpoint, setup.target, setup.dtype, token_id=setup.token_id
    )
    return plan_from_params(config, params, setup)


def plan_from_params(
    config: DFlashConfig, params: DFlashParams, setup: DrafterSetup
) -> DrafterPlan:
    """`plan_dflash` for weights that are on the device already.

    Raises:
        ConfigError: as `plan_dflash`.
    """
    block_size = setup.config.block_size or config.block_size
    window = setup.config.draft_window
    try:
        _check(config, block_size, window)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    tree = _tree(setup.config, block_size)

    def build(target: Target, page_size: int, kernels: Kernels) -> Drafter:
        return build_dflash(
            config,
            target,
            block_size=block_size,
            page_size=page_size,
            dtype=jnp.dtype(setup.dtype),
            kernels=kernels,
            draft_window=window,
            tree=tree,
        )

    kv_bytes, shapes = kv_and_shapes(config, config.num_layers, setup.dtype)
    context = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return DrafterPlan(
        params=with_context_weights(params, config),
        feature_layers=config.target_layer_ids,
        block_size=block_size if tree is None else tree.num_nodes,
        kv_bytes_per_token=kv_bytes,
        kernel_shapes={**shapes, "kv_write_context": {"layers": config.num_layers, **context}},
        build=build,
        takes_trees=True,
        tree_depth=None if tree is None else tree.depth,
    )


@functools.lru_cache(maxsize=64)
def build_dflash(
    config: DFlashConfig,
    target: Target,
    *,
    block_size: int,
    page_size: int,
    dtype: jnp.dtype,
    kernels: Kernels,
    draft_window: int | None = None,
    tree: TreeShape | None = None,
) -> Drafter:
    """Builds the pure functions of a DFlash drafter; equal arguments give the same `Drafter`.

    Args:
        config: sizes, windows and causality of its layers.
        target: whose embedding and head it borrows.
        block_size: N, the bonus token and N - 1 drafts; at most what the drafter was trained with.
        page_size: G, as the target's KV.
        dtype: of parameters, activations and KV, as the target's.
        kernels: the implementation of each op.
        draft_window: keys this far from a query, or farther, are not seen by any layer, as if
            each were a sliding layer; None leaves the layers as trained.
        tree: of the likeliest paths through the block (DDTree, arXiv 2604.12989), in place of the
            likeliest one alone.

    Raises:
        ValueError: a block size outside 2..trained, or a draft window that does not hold a block.
    """
    _check(config, block_size, draft_window)
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    specs = layer_specs(config, draft_window)

    def init_state(num_pages: int, num_slots: int, max_len: int) -> KV:
        shape = (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    def draft(params: ModelParams, kv: KV, context: DraftContext) -> tuple[DraftBlock, KV]:
        # A tree is verified in more rows than are drafted.
        block = context.block.columns(0, block_size)
        out = decoder_layers(
            target.embed(params.target, block.token_ids),
            kv,
            block,
            params.drafter,
            params.drafter.norm,
            inv_freq=jnp.asarray(inv_freq),
            specs=specs,
            kernels=kernels,
        )
        # Slot i stands for the token at its own position, not the next: slot 0 is known already.
        hidden = out.hidden[:, 1:]
        logits = target.logits(params.target, hidden)
        fits = block.lens + block_size <= config.max_position_embeddings
        if tree is None:
            drafts = context.sample(logits, block.positions[:, 1:])
            tokens = jnp.concatenate([block.token_ids[:, :1], drafts], axis=1)
            count = jnp.where(fits, jnp.int32(block_size - 1), jnp.int32(0))
            log_probs = None
            if context.log_probs is not None:
                log_probs = context.log_probs(logits, block.positions[:, 1:])
            return DraftBlock(tokens, count, log_probs=log_probs), out.kv
        likeliest = best_tokens(context.scores(logits, block.positions[:, 1:]), tree.width)
        candidates = best_first(*likeliest, tree.num_nodes)
        tokens, parents = keep_best(candidates, block.token_ids[:, 0], tree.num_nodes)
        count = jnp.where(fits, jnp.int32(tree.num_nodes - 1), jnp.int32(0))
        return DraftBlock(tokens, count, parents), out.kv

    def ingest(params: ModelParams, kv: KV, batch: IngestBatch) -> tuple[KV, tuple[()]]:
        pages = kv_write_context(
            project_context(params.drafter, batch.features, config, kernels),
            kv,
            batch.block.kv_locs,
            batch.block.positions,
            jnp.asarray(inv_freq),
            k_norm=params.drafter.k_norms,
            eps=config.rms_norm_eps,
            implementation=kernels.kv_write_context,
        )
        return pages, ()

    return Drafter(
        name="dflash",
        num_draft_tokens=(block_size if tree is None else tree.num_nodes) - 1,
        feature_layers=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        init_state=init_state,
        init_carry=lambda num_slots: (),
        draft=draft,
        ingest=ingest,
        depth=None if tree is None else tree.depth,
    )


_PLAIN = Kernels()


def project_context(
    params: DFlashParams,
    features: jax.Array,
    config: DFlashConfig,
    kernels: Kernels = _PLAIN,
) -> jax.Array:
    """Turns target features into every layer's K and V, before the norm and rotation of K.

    The context stream does not pass through the layers (DFlash, arXiv 2602.06036, section 4.1), so
    it needs neither their queries nor their input norms, and all layers' KV is known at once.

    Args:
        params: the drafter's weights.
        features: [B, N, F * E_target].
        config: sizes.
        kernels: the implementation of each op.

    Returns:
        [B, N, L, 2, J, D]: per layer the key heads, then the value heads.
    """
    if params.context is None:
        params = with_context_weights(params, config)
    mixed = linear(features, params.fc, kernels=kernels)
    context = rms_norm(mixed, params.hidden_norm, config.rms_norm_eps)
    kv = linear(context, params.context.kv, params.context.kv_bias, kernels=kernels)
    shape = (*features.shape[:2], config.num_layers, 2, config.num_kv_heads, config.head_dim)
    return kv.reshape(shape)


def with_context_weights(params: DFlashParams, config: DFlashConfig) -> DFlashParams:
    """Gathers the K and V rows of all layers in one matrix, for one product without slices."""
    first = config.num_heads * config.head_dim
    biases = [layer.qkv_bias[first:] for layer in params.layers if layer.qkv_bias is not None]
    context = ContextParams(
        kv=jnp.concatenate([layer.qkv[first:] for layer in params.layers]),
        kv_bias=jnp.concatenate(biases) if biases else None,
    )
    return params.replace(context=context)


def layer_specs(config: DFlashConfig, draft_window: int | None = None) -> tuple[LayerSpec, ...]:
    """The static side of each layer, narrowed to `draft_window` where one is given."""

    def narrowed(window: int | None) -> int | None:
        windows = [w for w in (window, draft_window) if w is not None]
        return min(windows, default=None)

    return tuple(
        LayerSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            causal=causal,
            window=narrowed(window),
        )
        for window, causal in zip(config.layer_windows, config.layer_causal, strict=True)
    )


def _tree(config: EngineConfig, block_size: int) -> TreeShape | None:
    depth, num_nodes = block_size - 1, config.tree_nodes or 0
    return tree_shape(
        config,
        depth=depth,
        width=min(_TREE_WIDTH, num_nodes),
        most_nodes=lambda width: num_best_first(num_nodes, depth, width),
    )


def _check(config: DFlashConfig, block_size: int, draft_window: int | None) -> None:
    if not 2 <= block_size <= config.block_size:
        raise ValueError(
            f"block size {block_size} is not possible: the drafter was trained with blocks of "
            f"{config.block_size}; use 2 to {config.block_size}"
        )
    if draft_window is not None and draft_window < block_size:
        raise ValueError(
            f"draft window {draft_window} does not hold a block of {block_size} tokens; "
            f"use at least {block_size}, or no window"
        )
