from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch, testing
from kernels_pallas.few_row_gemm import cases, few_row_gemm, triton
from tests.kernels import jitting

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0))


def oracle(x, weight, residual, *, swiglu):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = np.array([[row @ column for column in weight] for row in x])
    if swiglu:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * up
    return out if residual is None else out + np.asarray(residual, np.float64)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    run = functools.partial(few_row_gemm, **static)
    exact = testing.array(oracle(*args, **static), "float32")
    plain = exact if case.dtype == "float32" else jax.jit(run)(*args)
    actual = jitting.jit(few_row_gemm, implementation, **static)(*args)
    assert testing.compare_results(actual, plain, exact) is None


def test_sixty_four_bit_types_change_nothing(implementation):
    args, static = cases.make_inputs(cases.CASES[1])
    run = functools.partial(few_row_gemm, **static, implementation=implementation)
    with jax.enable_x64(True):
        wide = jax.jit(run)(*args)
    np.testing.assert_array_equal(wide, jax.jit(run)(*args))


@pytest.mark.parametrize(
    "config", [triton.Config(16, 64, 4, 2, True), triton.Config(32, 16, 4, 2, False)]
)
def test_either_operand_may_come_first(config):
    args, static = cases.make_inputs(cases.CASES[3])
    run = functools.partial(triton.few_row_gemm, **static, interpret=True, config=config)
    exact = testing.array(oracle(*args, **static), "float32")
    assert testing.compare_results(jax.jit(run)(*args), exact, exact) is None


@pytest.mark.parametrize("num_rows", [100, 128])
def test_the_columns_may_be_split_and_the_rows_be_more(num_rows):
    case = cases.Case("split", num_rows, 72, 192, residual=True)
    args, static = cases.make_inputs(case)
    # 64 columns each, which leaves the last none.
    config = triton.Config(64, 32, 4, 2, True, splits=4)
    run = functools.partial(triton.few_row_gemm, **static, interpret=True, config=config)
    exact = testing.array(oracle(*args, **static), "float32")
    assert testing.compare_results(jax.jit(run)(*args), exact, exact) is None


def test_stages_shrink_to_what_shared_memory_holds():
    # 64 rows of x and 64 of the weight, 128 columns of 2 bytes: 32 KiB a step, of 227 KiB.
    assert triton.choose(16, 4096, 4096, swiglu=False, bits=16).num_stages == 8
    assert triton.choose(64, 4096, 4096, swiglu=False, bits=16).num_stages == 6


def test_more_rows_than_the_kernel_is_for_are_refused():
    assert dispatch.pick("few_row_gemm", device=H200, num_rows=64).name == "triton"
    choice = dispatch.pick("few_row_gemm", device=H200, num_rows=65)
    assert choice.name == "xla"
    assert "num_rows=65 is above 64" in choice.reason


def test_shapes_and_dtypes_are_checked():
    x, weight, residual = jnp.ones((2, 8)), jnp.ones((6, 8)), jnp.ones((2, 6))
    wrong = [
        (x, weight[:, 1:], residual),
        (x, weight.astype(jnp.bfloat16), residual),
        (x, weight, residual[:, 1:]),
        (x, weight, residual.astype(jnp.bfloat16)),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            few_row_gemm(*args)
    with pytest.raises(AssertionError):
        few_row_gemm(x, weight[1:], swiglu=True)
