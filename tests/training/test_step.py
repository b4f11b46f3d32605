"""One step: micro-batches, the frozen target, scaled features, and what a leak would do."""

from __future__ import annotations

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
    DRAFTER,
    TARGET,
    device_rows,
    drafter_params,
    random_rows,
    step_spec,
    target_params,
)

SPEC = step_spec(num_anchors=4, weight_decay=0.01)
ROWS = device_rows(random_rows().take(np.arange(4)))


@cache
def scale():
    return measure_feature_scale(SPEC, target_params(), ROWS)


def start(spec=SPEC):
    return init_train_state(spec, drafter_params(), jnp.copy(scale()))


def step(spec, state):
    rate = np.float32(1e-2)
    return build_train_step(spec)(state, target_params(), ROWS, jax.random.key(3), rate)


def test_features_of_any_size_reach_fc_at_unit_size():
    features = build_dense_forward(TARGET, feature_layers=DRAFTER.target_layer_ids)(
        target_params(), ROWS
    ).features
    counted = (ROWS.positions > 0) & (ROWS.segments > 0)
    some = np.asarray(features)[np.asarray(counted)] * np.asarray(scale())
    np.testing.assert_allclose((some**2).mean(0), 1.0, rtol=1e-3)
    params = drafter_params()
    served = served_params(params, scale())
    np.testing.assert_allclose(
        features @ served.fc.T, (features * scale()[None, None]) @ params.fc.T, rtol=0, atol=1e-4
    )


def test_a_step_lowers_the_loss_and_uses_up_the_state():
    state = start()
    before = build_measure(SPEC)(served_params(state.params, scale()), target_params(), ROWS)
    leaf = state.params.fc
    for _ in range(5):
        state, _ = step(SPEC, state)
    after = build_measure(SPEC)(served_params(state.params, scale()), target_params(), ROWS)
    assert after.loss < 0.9 * before.loss
    assert float(after.norm) == float(before.norm)
    assert leaf.is_deleted()
    assert int(state.step) == 5
    np.testing.assert_array_equal(state.feature_scale, scale())


def test_anchors_depend_on_key_and_step_alone():
    (_, first), (state, again) = step(SPEC, start()), step(SPEC, start())
    jax.tree.map(np.testing.assert_array_equal, first, again)
    _, second = step(SPEC, state)
    assert float(first.loss) != float(second.loss)


def test_micro_batches_sum_to_one_batch():
    """With all anchors of every row drawn, the parts see what the whole sees."""
    every = step_spec(num_anchors=23, loss=LossSpec(block_size=BLOCK, chunk=1000))
    whole, sums = step(every, start(every))
    parts_spec = step_spec(
        num_anchors=23, loss=LossSpec(block_size=BLOCK, chunk=1000), micro_batches=2
    )
    parts, parts_sums = step(parts_spec, start(parts_spec))
    for got, expected in zip(jax.tree.leaves(parts_sums), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    # Adam's first step is the sign of the gradient; its moments show the gradient itself.
    got, expected = parts.opt_state[1].mu, whole.opt_state[1].mu
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
