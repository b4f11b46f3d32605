from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from kernels_pallas import dispatch, testing
from kernels_pallas.add_norm_qkv import add_norm_qkv, cases
from tests.kernels import jitting, kv_oracle
from tests.kernels.test_add_norm_gemm import oracle as add_norm_gemm_oracle
from tests.kernels.test_early_launch import forward_of


def oracle(x, delta, norm, weight, kv_pages, kv_locs, positions, inv_freq, layer, *, eps, **heads):
    product = add_norm_gemm_oracle(x, delta, norm, weight, layer, eps=eps, swiglu=False)
    qkv = product[1].reshape(*kv_locs.shape, -1)
    places = (kv_pages, kv_locs, positions, inv_freq)
    written = kv_oracle.write(qkv, *places, q_norm=None, k_norm=None, eps=eps, **heads)
    return product[0], *written


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact = tuple(testing.array(x, "float32") for x in oracle(*args, **static))
    plain = exact
    if case.dtype != "float32":
        plain = jax.jit(functools.partial(add_norm_qkv, **static))(*args)
    actual = jitting.jit(add_norm_qkv, implementation, **static)(*args)
    assert testing.compare_results(actual, plain, exact) is None


@pytest.mark.nightly
def test_sixty_four_bit_types_change_nothing(implementation):
    args, static = cases.make_inputs(cases.CASES[2])
    run = functools.partial(add_norm_qkv, **static, implementation=implementation)
    with jax.enable_x64(True):
        wide = jax.jit(run)(*args)
    jax.tree.map(np.testing.assert_array_equal, wide, jax.jit(run)(*args))


def test_normed_heads_and_wide_rows_are_refused():
    device = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
    pick = functools.partial(dispatch.pick, "add_norm_qkv", device=device)
    assert pick(width=576, qk_norm=False).name == "triton"
    assert "heads are normed" in pick(width=576, qk_norm=True).reason
    assert "width=4096 is above 1024" in pick(width=4096).reason


@pytest.mark.nightly
def test_a_layer_is_the_same_with_its_projection_in_one_launch():
    merged = Kernels(add_norm_gemm="triton_interpret", add_norm_qkv="triton_interpret")
    results = []
    for kernels in (merged, Kernels()):
        forward, args = forward_of((0, 1), kernels=kernels, dtype="float32", architecture="llama")
        out = jax.jit(forward)(*args)
        results.append((out.hidden, out.features, *out.kv))
    forward, args = forward_of((), kernels=merged, dtype="float32", architecture="llama")
    text = str(jax.jit(forward).trace(*args).jaxpr)
    # The first norm has nothing to add.
    assert (text.count("name=add_norm_qkv"), text.count("name=add_norm_gemm")) == (1, 2)
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_shapes_and_dtypes_are_checked():
    args, static = cases.make_inputs(cases.CASES[0])
    x, delta, norm, weight, pages, locs, positions, inv_freq, _ = args
    wrong = [
        (x, delta[:, 1:], norm, weight, pages, locs, positions, inv_freq),
        (x, delta, norm[1:], weight, pages, locs, positions, inv_freq),
        (x, delta, norm, weight[1:], pages, locs, positions, inv_freq),
        (x, delta, norm, weight, pages[:, :1], locs, positions, inv_freq),
        (x, delta, norm, weight, pages, locs[0], positions, inv_freq),
        (x, delta, norm, weight, pages, locs, positions.astype(jnp.float32), inv_freq),
        (x, delta, norm, weight, pages, locs, positions, inv_freq[1:]),
        (x, delta, norm[None], weight, pages, locs, positions, inv_freq, locs.astype(jnp.float32)),
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            add_norm_qkv(*each, **static)
