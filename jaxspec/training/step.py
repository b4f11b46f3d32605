"""One optimiser step of a drafter against its frozen target, and one measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models.layers import TargetParams
from jaxspec.training.anchors import Anchors, TokenRows, possible_anchors, sample_anchors
from jaxspec.training.dflash_forward import build_dflash_forward
from jaxspec.training.eagle_forward import build_eagle_forward
from jaxspec.training.loss import SlotSums
from jaxspec.training.spec import StepSpec
from jaxspec.training.target import build_dense_forward

DrafterParams = DFlashParams | EagleParams
Frozen = Any  # what a step reads and never changes: the target, and what else the drafter needs
Forward = Callable[
    [DrafterParams, Frozen, TokenRows, Anchors], tuple[jax.Array, tuple[SlotSums, jax.Array]]
]

_BETAS = (0.9, 0.95)


@flax.struct.dataclass
class TrainState:
    """What a step changes: the donated argument.

    params: float32 master weights, `fc` of them for features of unit size. opt_state: Adam's.
    feature_scale: f32[F * E], never changed. step: i32[] steps done. mean: the running mean of
    `params`, None where there is none.
    """

    params: DrafterParams
    opt_state: Any
    feature_scale: jax.Array
    step: jax.Array
    mean: DrafterParams | None = None

    @property
    def served(self) -> DrafterParams:
        """The weights that are measured and written out."""
        params = self.params if self.mean is None else self.mean
        return served_params(params, self.feature_scale)


def served_params(params: DrafterParams, feature_scale: jax.Array) -> DrafterParams:
    """The weights that read the target's features as they are.

    A few entries of a residual stream are a hundred times larger than the others. Adam moves all
    weights alike, so it would shake those that read large entries and hardly move the rest;
    therefore `fc` is trained for features of unit size and scaled where it is used.
    """
    return params.replace(fc=params.fc * feature_scale[None])


TrainStep = Callable[
    [TrainState, Frozen, TokenRows, jax.Array, jax.Array], tuple[TrainState, SlotSums]
]


def build_optimizer(spec: StepSpec) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping; the learning rate is applied by the step."""
    return optax.chain(
        optax.clip_by_global_norm(spec.clip),
        optax.scale_by_adam(*_BETAS),
        optax.add_decayed_weights(spec.weight_decay, mask=_decayed),
    )


def _decayed(params: DrafterParams) -> DrafterParams:
    """Which weights decay: matrices, not norms, though stacked, and biases."""
    matrices = jax.tree.map(lambda weight: weight.ndim == 2, params)
    norms = [field.name for field in fields(params) if "norm" in field.name]
    return matrices.replace(
        **{name: jax.tree.map(lambda _: False, getattr(params, name)) for name in norms}
    )


def init_train_state(spec: StepSpec, params: DrafterParams, feature_scale: jax.Array) -> TrainState:
    """Step 0."""
    opt_state = build_optimizer(spec).init(params)
    mean = jax.tree.map(jnp.copy, params) if spec.ema else None  # the step donates both
    return TrainState(params, opt_state, feature_scale, jnp.zeros((), jnp.int32), mean)


def measure_feature_scale(spec: StepSpec, target: TargetParams, rows: TokenRows) -> jax.Array:
    """f32[F * E]: one over the root mean square of each feature over some rows.

    First tokens are left out: attention sinks there are larger than anything else.
    """
    return _build_feature_scale(spec)(target, rows)


@functools.lru_cache(maxsize=16)
def _build_feature_scale(spec: StepSpec) -> Callable[[TargetParams, TokenRows], jax.Array]:
    dense = build_dense_forward(
        spec.target, feature_layers=spec.feature_layers, attention=spec.attention
    )

    def scale(target: TargetParams, rows: TokenRows) -> jax.Array:
        counted = ((rows.segments > 0) & (rows.positions > 0))[..., None]
        features = dense(target, rows).features.astype(jnp.float32)
        squares = jnp.where(counted, features**2, 0.0).sum((0, 1))
        return jax.lax.rsqrt(squares / counted.sum(dtype=jnp.float32) + 1e-6)

    return jax.jit(scale)


@functools.lru_cache(maxsize=16)
def build_train_step(spec: StepSpec) -> TrainStep:
    """Builds (DONATED state, frozen, rows, key, learning rate f32[]) -> (state, sums).

    The anchors depend on the key and the step alone. Equal specs give the same compiled program.
    """
    optimizer = build_optimizer(spec)
    forward = build_forward(spec)

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
        mean = state.mean
        if mean is not None:
            # A mean of few steps would be one of the first weights, which know nothing.
            done = state.step.astype(jnp.float32)
            decay = jnp.minimum(spec.ema, (1.0 + done) / (10.0 + done))
            mean = jax.tree.map(lambda m, p: decay * m + (1.0 - decay) * p, mean, params)
        after = state.replace(params=params, opt_state=opt_state, step=state.step + 1, mean=mean)
        return after, sums

    return jax.jit(train_step, donate_argnames="state")


@functools.lru_cache(maxsize=16)
def build_measure(
    spec: StepSpec,
) -> Callable[[DrafterParams, Frozen, TokenRows, jax.Array], tuple[SlotSums, jax.Array]]:
    """Builds (params, frozen, rows, index i32[R, A]) -> (sums, f32[R, A] lengths).

    The blocks begin where `index` says; one that begins at a token that cannot be a bonus token
    counts nowhere.
    """
    forward = build_forward(spec)

    def measure(params, target, rows, index):
        anchors = Anchors(index, jnp.take_along_axis(possible_anchors(rows), index, axis=1))
        return forward(params, target, rows, anchors)[1]

    return jax.jit(measure)


def build_forward(spec: StepSpec) -> Forward:
    """(params, frozen, rows, anchors) -> (numerator of the loss, (sums, f32[R, A] lengths))."""
    if isinstance(spec.drafter, EagleConfig):
        return build_eagle_forward(spec)
    return build_dflash_forward(spec)
