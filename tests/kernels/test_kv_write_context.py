from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.kv_write_context import cases, kv_write_context
from tests.kernels import jitting, kv_oracle

jitted = functools.cache(functools.partial(jitting.jit, kv_write_context))


def write(args, implementation, *, k_norm, **static):
    return jax.tree.map(np.asarray, jitted(implementation, **static)(*args, k_norm=k_norm))


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
    run = functools.partial(kv_write_context, **static)
    other = jax.ShapeDtypeStruct(pages[1].shape, jnp.bfloat16)
    wrong = [
        (cut(kv, 3), pages, kv_locs, positions, inv_freq),
        (kv, pages[:1], kv_locs, positions, inv_freq),
        (kv, (pages[0], cut(pages[1], 0)), kv_locs, positions, inv_freq),
        (kv, (pages[0], other), kv_locs, positions, inv_freq),
        (kv, pages, kv_locs, cut(positions, 0), inv_freq),
        (kv, pages, cut(kv_locs, 1), positions, inv_freq),
        (kv, pages, kv_locs, positions, cut(inv_freq, 0)),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            jax.eval_shape(run, *args)
    with pytest.raises(AssertionError):
        run = functools.partial(run, k_norm=cut(static["k_norm"], 0))
        jax.eval_shape(run, kv, pages, kv_locs, positions, inv_freq)


def cut(x, axis):
    """x's shape, one shorter along an axis."""
    shape = [size - (i == axis) for i, size in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, x.dtype)
