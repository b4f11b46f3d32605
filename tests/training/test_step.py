"""One step: micro-batches, the frozen target, scaled features, and what a leak would do."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.training.loss import LossSpec
from jaxspec.training.step import (
    build_measure,
    build_train_step,
    init_train_state,
    measure_feature_scale,
    served_params,
)
from jaxspec.training.target import build_dense_forward
from tests.training.tiny import (
    BLOCK,
    SHALLOW,
    TARGET,
    device_rows,
    drafter_params,
    random_rows,
    step_spec,
    target_params,
)

# All anchors of a row are drawn, so that parts of a batch see what the whole sees.
SPEC = step_spec(num_anchors=23, weight_decay=0.01, loss=LossSpec(block_size=BLOCK, chunk=1000))
KEY = jax.random.key(3)
ROWS = device_rows(random_rows().take(np.arange(4)))


@cache
def scale():
    return measure_feature_scale(SPEC, target_params(), ROWS)


def start():
    return init_train_state(SPEC, drafter_params(SHALLOW), jnp.copy(scale()))


def step(spec, state):
    rate = np.float32(1e-2)
    return build_train_step(spec)(state, target_params(), ROWS, KEY, rate)


def measure(state):
    index = jnp.tile(jnp.arange(23, dtype=jnp.int32)[None], (len(ROWS.token_ids), 1))
    params = served_params(state.params, scale())
    return build_measure(SPEC)(params, target_params(), ROWS, index)[0]


def test_features_of_any_size_reach_fc_at_unit_size():
    features = build_dense_forward(TARGET, feature_layers=SHALLOW.target_layer_ids)(
        target_params(), ROWS
    ).features
    counted = (ROWS.positions > 0) & (ROWS.segments > 0)
    some = np.asarray(features)[np.asarray(counted)] * np.asarray(scale())
    np.testing.assert_allclose((some**2).mean(0), 1.0, rtol=1e-3)
    params = drafter_params(SHALLOW)
    served = served_params(params, scale())
    np.testing.assert_allclose(
        features @ served.fc.T, (features * scale()[None, None]) @ params.fc.T, rtol=0, atol=1e-4
    )


def test_a_step_lowers_the_loss_and_uses_up_the_state():
    state = start()
    before = measure(state)
    leaf = state.params.fc
    for _ in range(5):
        state, _ = step(SPEC, state)
    after = measure(state)
    assert after.loss < 0.9 * before.loss
    assert float(after.norm) == float(before.norm)
    assert leaf.is_deleted()
    assert int(state.step) == 5
    np.testing.assert_array_equal(state.feature_scale, scale())


def test_a_step_is_the_same_every_time():
    first, again = step(SPEC, start()), step(SPEC, start())
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_micro_batches_sum_to_one_batch():
    whole, sums = step(SPEC, start())
    parts, parts_sums = step(dataclasses.replace(SPEC, micro_batches=2), start())
    for got, expected in zip(jax.tree.leaves(parts_sums), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    # Adam's first step is the sign of the gradient; its moments show the gradient itself.
    got, expected = parts.opt_state[1].mu, whole.opt_state[1].mu
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_the_running_mean_follows_the_weights_and_is_what_is_served():
    """Its decay grows from 1/10, so that a young mean is not one of the first weights."""
    spec = dataclasses.replace(SPEC, ema=0.9)
    params = drafter_params(SHALLOW)
    state = init_train_state(spec, params, jnp.copy(scale()))
    mean = np.asarray(params.norm)
    for number in range(3):
        state, _ = step(spec, state)
        decay = min(0.9, (1 + number) / (10 + number))
        mean = decay * mean + (1 - decay) * np.asarray(state.params.norm)
    np.testing.assert_allclose(state.mean.norm, mean, rtol=1e-5)
    np.testing.assert_array_equal(state.served.norm, state.mean.norm)
    np.testing.assert_array_equal(state.served.fc, state.mean.fc * scale()[None])
    plain = start()
    assert plain.mean is None
    np.testing.assert_array_equal(plain.served.norm, plain.params.norm)
