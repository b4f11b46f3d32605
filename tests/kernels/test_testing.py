from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels_pallas import testing


def leaves(actual, plain, exact, dtype="bfloat16"):
    result = [testing.array(values, dtype) for values in (actual, plain)]
    return testing.compare_results(*result, testing.array(exact, "float32"))


def test_a_kernel_as_good_as_the_plain_computation_passes():
    assert leaves([1.0, 2.03125], [1.0, 2.03125], [1.0, 2.02]) is None


def test_twice_the_plain_error_and_a_rounding_is_the_limit():
    # bfloat16: eps 1/128; plain error 1/64, largest result 2: the limit is 2/64 + 2/128 = 3/64.
    plain, exact = [1.0, 1.984375], [1.0, 2.0]
    assert leaves([1.0, 2.046875], plain, exact) is None
    assert leaves([1.0, 2.0625], plain, exact) == "result: error 0.0625 > 0.0469"


def test_float32_may_differ_by_the_order_of_sums():
    exact = [1.0, 8.0]
    assert leaves([1.0, 8.00001], exact, exact, "float32") is None
    assert "error" in leaves([1.0, 8.0001], exact, exact, "float32")


def test_poison_may_stand_where_the_reference_has_it_too():
    nan = float("nan")
    assert leaves([1.0, nan], [1.0, nan], [1.0, nan]) is None
    assert leaves([nan, 1.0], [1.0, 1.0], [1.0, 1.0]) == (
        "result: 1 values finite in one, not in the other"
    )


def test_whole_numbers_must_be_equal_and_the_first_wrong_one_is_named():
    result = {"a": np.array([[1, 2], [3, 4]]), "b": np.array([True])}
    wrong = {"a": np.array([[1, 5], [3, 6]]), "b": np.array([True])}
    assert testing.compare_results(result, result, result) is None
    assert testing.compare_results(wrong, result, result) == (
        "result['a']: 2 of 4 differ, first at [0, 1]: 5, not 2"
    )


def test_shape_and_dtype_are_part_of_a_result():
    plain = jnp.zeros(3, jnp.int32)
    assert testing.compare_results(jnp.zeros(2, jnp.int32), plain, plain) == (
        "result: int32[2], not int32[3]"
    )


def test_only_low_precision_is_widened():
    tree = {
        "low": jnp.zeros(1, jnp.bfloat16),
        "high": jnp.zeros(1, jnp.float32),
        "ids": jnp.zeros(1, jnp.int32),
    }
    dtypes = {name: str(leaf.dtype) for name, leaf in testing.widen(tree).items()}
    assert dtypes == {"low": "float32", "high": "float32", "ids": "int32"}
