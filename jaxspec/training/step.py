"""One optimiser step of a drafter against its frozen target, and one measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import TargetParams, embed_tokens
from jaxspec.training.anchors import (
    Anchors,
    Labels,
    TokenRows,
    labels_of,
    possible_anchors,
    sample_anchors,
)
from jaxspec.training.dflash import block_hidden, block_ids
from jaxspec.training.loss import LossSpec, SlotSums, block_loss
from jaxspec.training.target import build_dense_forward

_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Everything static about a step.

    num_anchors: A, blocks a row. micro_batches: parts that a step's rows are taken in, one after
    another. attention: of the target, see `build_dense_forward`. chunk: see `block_attention`.
    """

    target: ModelConfig
    drafter: DFlashConfig
    loss: LossSpec
    num_anchors: int
    micro_batches: int = 1
    compute_dtype: str = "bfloat16"
    attention: str = "xla"
    chunk: int = 1 << 30
    weight_decay: float = 0.0
    clip: float = 1.0


@flax.struct.dataclass
class TrainState:
    """What a step changes: the donated argument.

    params: float32 master weights, `fc` of them for features of unit size. opt_state: Adam's.
    feature_scale: f32[F * E], never changed. step: i32[] steps done.
    """

    params: DFlashParams
    opt_state: Any
    feature_scale: jax.Array
    step: jax.Array


def served_params(params: DFlashParams, feature_scale: jax.Array) -> DFlashParams:
    """The weights that read the target's features as they are.

    A few entries of a residual stream are a hundred times larger than the others. Adam moves all
    weights alike, so it would shake those that read large entries and hardly move the rest;
    therefore `fc` is trained for features of unit size and scaled where it is used.
    """
    return params.replace(fc=params.fc * feature_scale[None])


TrainStep = Callable[
    [TrainState, TargetParams, TokenRows, jax.Array, jax.Array], tuple[TrainState, SlotSums]
]


def build_optimizer(spec: StepSpec) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping; the learning rate is applied by the step."""
    return optax.chain(
        optax.clip_by_global_norm(spec.clip),
        optax.scale_by_adam(*_BETAS),
        optax.add_decayed_weights(spec.weight_decay, mask=_decayed),
    )


def _decayed(params: DFlashParams) -> DFlashParams:
    """Which weights decay: matrices, not norms and biases."""
    none = jax.tree.map(lambda _: False, params)
    layers = jax.tree.map(lambda weight: weight.ndim == 2, params.layers)
    return none.replace(fc=True, layers=layers)


def init_train_state(spec: StepSpec, params: DFlashParams, feature_scale: jax.Array) -> TrainState:
    """Step 0."""
    opt_state = build_optimizer(spec).init(params)
    return TrainState(params, opt_state, feature_scale, jnp.zeros((), jnp.int32))


def measure_feature_scale(spec: StepSpec, target: TargetParams, rows: TokenRows) -> jax.Array:
    """f32[F * E]: one over the root mean square of each feature over some rows.

    First tokens are left out: attention sinks there are larger than anything else.
    """
    return _build_feature_scale(spec)(target, rows)


@functools.lru_cache(maxsize=16)
def _build_feature_scale(spec: StepSpec) -> Callable[[TargetParams, TokenRows], jax.Array]:
    dense = build_dense_forward(
        spec.target, feature_layers=spec.drafter.target_layer_ids, attention=spec.attention
    )

    def scale(target: TargetParams, rows: TokenRows) -> jax.Array:
        counted = ((rows.segments > 0) & (rows.positions > 0))[..., None]
        features = dense(target, rows).features.astype(jnp.float32)
        squares = jnp.where(counted, features**2, 0.0).sum((0, 1))
        return jax.lax.rsqrt(squares / counted.sum(dtype=jnp.float32) + 1e-6)

    return jax.jit(scale)


@functools.lru_cache(maxsize=16)
def build_train_step(spec: StepSpec) -> TrainStep:
    """Builds (DONATED state, target params, rows, key, learning rate f32[]) -> (state, sums).

    The anchors depend on the key and the step alone. Equal specs give the same compiled program.
    """
    optimizer = build_optimizer(spec)
    forward = _build_forward(spec)

    def train_step(state, target, rows, key, learning_rate):
        def numerator(params, target, rows, key) -> tuple[jax.Array, SlotSums]:
            params = served_params(params, state.feature_scale)
            anchors = sample_anchors(key, rows, spec.num_anchors)
            loss, (sums, _) = forward(params, target, rows, anchors)
            return loss, sums

        key = jax.random.fold_in(key, state.step)
        value_and_grad = jax.value_and_grad(numerator, has_aux=True)
        if spec.micro_batches == 1:
            (_, sums), grads = value_and_grad(state.params, target, rows, key)
        else:
            parts = jax.tree.map(lambda x: x.reshape(spec.micro_batches, -1, *x.shape[1:]), rows)

            def add(total, part):
                (_, sums), grads = value_and_grad(state.params, target, *part)
                return jax.tree.map(jnp.add, total, (sums, grads)), None

            keys = jax.random.split(key, spec.micro_batches)
            shapes = jax.eval_shape(
                lambda: value_and_grad(
                    state.params, target, jax.tree.map(lambda x: x[0], parts), key
                )
            )
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0][1], shapes[1]))
            (sums, grads), _ = jax.lax.scan(add, zeros, (parts, keys))
        scale = 1.0 / jnp.maximum(sums.norm, 1.0)
        grads = jax.tree.map(lambda g: g * scale, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), sums

    return jax.jit(train_step, donate_argnames="state")


@functools.lru_cache(maxsize=16)
def build_measure(
    spec: StepSpec,
) -> Callable[[DFlashParams, TargetParams, TokenRows, jax.Array], tuple[SlotSums, jax.Array]]:
    """Builds (params, target params, rows, index i32[R, A]) -> (sums, f32[R, A] lengths).

    The blocks begin where `index` says; one that begins at a token that cannot be a bonus token
    counts nowhere.
    """
    forward = _build_forward(spec)

    def measure(params, target, rows, index):
        anchors = Anchors(index, jnp.take_along_axis(possible_anchors(rows), index, axis=1))
        return forward(params, target, rows, anchors)[1]

    return jax.jit(measure)


def _build_forward(
    spec: StepSpec,
) -> Callable[[DFlashParams, TargetParams, TokenRows, Anchors], tuple[jax.Array, SlotSums]]:
    """(params, target, rows, anchors) -> (numerator of the loss, sums)."""
    dtype = jnp.dtype(spec.compute_dtype)
    dense = build_dense_forward(
        spec.target,
        feature_layers=spec.drafter.target_layer_ids,
        with_hidden=spec.loss.soft_labels > 0,
        attention=spec.attention,
    )

    def forward(params, target, rows, anchors):
        with jax.named_scope("target"):
            seen = jax.lax.stop_gradient(dense(target, rows))
        labels = labels_of(rows, anchors, spec.drafter.block_size)
        with jax.named_scope("drafter"):
            hidden = block_hidden(
                jax.tree.map(lambda p: p.astype(dtype), params),
                spec.drafter,
                seen.features,
                embed_tokens(target.embed, block_ids(rows, anchors, spec.drafter)),
                rows,
                anchors,
                chunk=spec.chunk,
            )
        teacher = None if seen.hidden is None else _teacher(seen.hidden, labels)
        with jax.named_scope("loss"):
            return block_loss(hidden, target.head, labels, teacher, spec.loss)

    return forward


def _teacher(hidden: jax.Array, labels: Labels) -> jax.Array:
    """[R, A, K, E]: the target's output one token before each label, which chose it."""
    before = jnp.maximum(labels.source - 1, 0).reshape(labels.source.shape[0], -1, 1)
    picked = jnp.take_along_axis(hidden, before, axis=1)
    return picked.reshape(*labels.source.shape, hidden.shape[-1])
