from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.add_rms_norm import add_rms_norm, cases
from tests.kernels import jitting


def oracle(x, delta, weight, layer, *, eps):
    weight = weight if layer is None else weight[int(layer[0])]
    delta = np.asarray(delta, np.float64)
    total = np.asarray(x, np.float64) + (delta.sum(axis=0) if delta.ndim == 3 else delta)
    normed = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + eps)
    return total, normed * np.asarray(weight, np.float64)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    run = functools.partial(add_rms_norm, **static)
    exact = tuple(testing.array(each, "float32") for each in oracle(*args, **static))
    plain = exact if case.dtype == "float32" else jax.jit(run)(*args)
    actual = jitting.jit(add_rms_norm, implementation, **static)(*args)
    assert testing.compare_results(actual, plain, exact) is None


def test_nan_stays_in_its_row(implementation):
    x, delta = jnp.ones((2, 64)).at[0, 3].set(jnp.nan), jnp.ones((2, 64))
    run = jax.jit(functools.partial(add_rms_norm, implementation=implementation))
    total, normed = run(x, delta, jnp.ones(64))
    assert np.isnan(normed[0]).all()
    np.testing.assert_array_equal(total[1], np.full(64, 2.0))
    np.testing.assert_allclose(normed[1], np.ones(64), rtol=1e-6)


def test_shapes_and_dtypes_are_checked():
    x, weight = jnp.ones((2, 8)), jnp.ones(8)
    for args in [(x, x[:1], weight), (x, x, weight[1:]), (x, x.astype(jnp.bfloat16), weight)]:
        with pytest.raises(AssertionError):
            add_rms_norm(*args)
    with pytest.raises(AssertionError):
        add_rms_norm(x[0], x[0], weight)
