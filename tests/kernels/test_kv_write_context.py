from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.kv_write_context import cases, kv_write_context
from tests.kernels import jitting, kv_oracle


def write(args, implementation, **static):
    return jitting.jit(kv_write_context, implementation, **static)(*args)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact = kv_oracle.write_context(*args, **static)
    exact = tuple(testing.array(each, "float32") for each in exact)
    plain = exact if case.dtype == "float32" else write(args, "xla", **static)
    assert testing.compare_results(write(args, implementation, **static), plain, exact) is None


def small(**changes):
    return cases.make_inputs(cases.Case("small", 2, 3, layers=2)._replace(**changes))


def test_each_layer_gets_its_own_rows(implementation):
    (kv, pages, kv_locs, positions, inv_freq), static = small()
    first, second = write((kv, pages, kv_locs, positions, inv_freq), implementation, **static)
    page, offset = kv_locs[1, 2] // 16, kv_locs[1, 2] % 16
    np.testing.assert_array_equal(first[page, 1, :, offset], kv[1, 2, 0, 1])
    np.testing.assert_array_equal(second[page, 1, :, offset], kv[1, 2, 1, 1])


def test_all_layers_are_one_launch_in_place():
    args, static = small()
    kernel = functools.partial(kv_write_context, **static, implementation="triton")
    text = testing.lower_for_cuda(kernel, *args)
    assert text.count("custom_call") == 1
    assert text.count("output_operand_alias<") == 2


def test_shapes_and_dtypes_are_checked():
    (kv, pages, kv_locs, positions, inv_freq), static = small()
    wrong = [
        (kv[:, :, :, :1], pages, kv_locs, positions, inv_freq),
        (kv, pages[:1], kv_locs, positions, inv_freq),
        (kv, (pages[0], pages[1][:1]), kv_locs, positions, inv_freq),
        (kv, (pages[0], pages[1].astype(jnp.bfloat16)), kv_locs, positions, inv_freq),
        (kv, pages, kv_locs, positions[:1], inv_freq),
        (kv, pages, kv_locs.astype(jnp.float32), positions, inv_freq),
        (kv, pages, kv_locs, positions, inv_freq[1:]),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            kv_write_context(*args, **static)
    with pytest.raises(AssertionError):
        kv_write_context(kv, pages, kv_locs, positions, inv_freq, k_norm=jnp.ones((1, 64)))
