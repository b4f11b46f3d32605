from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from kernels_pallas import dispatch, testing
from kernels_pallas.add_norm_gemm import add_norm_gemm, cases, triton
from tests.kernels import jitting
from tests.kernels.test_early_launch import forward_of


def oracle(x, delta, norm, weight, layer, *, eps, swiglu):
    x, delta, norm, weight = (np.asarray(a, np.float64) for a in (x, delta, norm, weight))
    total = x + delta
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + eps)
    out = normed * (norm if layer is None else norm[layer[0]]) @ weight.T
    if swiglu:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * up
    return total, out


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact = tuple(testing.array(x, "float32") for x in oracle(*args, **static))
    plain = exact
    if case.dtype != "float32":
        plain = jax.jit(functools.partial(add_norm_gemm, **static))(*args)
    actual = jitting.jit(add_norm_gemm, implementation, **static)(*args)
    assert testing.compare_results(actual, plain, exact) is None


@pytest.mark.nightly
def test_sixty_four_bit_types_change_nothing(implementation):
    args, static = cases.make_inputs(cases.CASES[2])
    run = functools.partial(add_norm_gemm, **static, implementation=implementation)
    with jax.enable_x64(True):
        wide = jax.jit(run)(*args)
    jax.tree.map(np.testing.assert_array_equal, wide, jax.jit(run)(*args))


def test_more_rows_or_columns_than_registers_hold_are_refused():
    device = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
    pick = functools.partial(dispatch.pick, "add_norm_gemm", device=device)
    assert pick(num_rows=triton.MAX_ROWS, width=576).name == "triton"
    assert "width=4096 is above 1024" in pick(width=4096).reason
    assert "num_rows=17 is above 16" in pick(num_rows=17).reason


@pytest.mark.nightly
def test_a_layer_is_the_same_with_its_norms_in_the_products():
    merged = Kernels(add_norm_gemm="triton_interpret")
    results = []
    for kernels in (merged, Kernels()):
        forward, args = forward_of((0, 1), kernels=kernels, dtype="float32")
        out = jax.jit(forward)(*args)
        results.append((out.hidden, out.features, *out.kv))
    text = jax.jit(forward_of((), kernels=merged, dtype="float32")[0]).trace(*args)
    assert str(text.jaxpr).count("name=add_norm_gemm") == 3  # the first norm has nothing to add
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_shapes_and_dtypes_are_checked():
    x, norm, weight = jnp.ones((2, 8)), jnp.ones((8,)), jnp.ones((6, 8))
    wrong = [
        (x, x[1:], norm, weight),
        (x, x, norm[1:], weight),
        (x, x, norm[None], weight),
        (x, x, norm, weight[:, 1:]),
        (x, x, norm, weight.astype(jnp.bfloat16)),
        (x, x.astype(jnp.bfloat16), norm, weight),
        (x, x, norm[None], weight, jnp.zeros((2,), jnp.int32)),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            add_norm_gemm(*args)
    with pytest.raises(AssertionError):
        add_norm_gemm(x, x, norm, weight[1:], swiglu=True)
