from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch, testing
from kernels_pallas.kv_write import cases, kv_write, triton
from tests.kernels import jitting, kv_oracle

jitted = functools.cache(functools.partial(jitting.jit, kv_write))


def write(args, implementation, *, q_norm, k_norm, layer=None, **static):
    run = jitted(implementation, **static)
    return jax.tree.map(np.asarray, run(*args, q_norm=q_norm, k_norm=k_norm, layer=layer))


@functools.cache
def expected(case):
    """The oracle's queries and pages, and the plain ones in the case's own precision."""
    args, static = cases.make_inputs(case)
    exact = kv_oracle.write(*args, **static)
    exact = tuple(testing.array(each, "float32") for each in exact)
    return exact, exact if case.dtype == "float32" else write(args, "xla", **static)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    assert testing.compare_results(write(args, implementation, **static), plain, exact) is None


def small(**changes):
    """Arguments on the host, so that tests change them without compiling anything."""
    args, static = cases.make_inputs(cases.Case("small", 2, 3)._replace(**changes))
    return tuple(np.array(each) for each in args), static


def test_rows_not_named_keep_what_they_held(implementation):
    args, static = small()
    _, pages = write(args, implementation, **static)
    before = np.asarray(args[1]).transpose(0, 3, 1, 2, 4).reshape(-1, 2, 2, 64)
    after = np.asarray(pages).transpose(0, 3, 1, 2, 4).reshape(-1, 2, 2, 64)
    others = np.setdiff1d(np.arange(len(before)), np.asarray(args[2]).ravel())
    np.testing.assert_array_equal(after[others], before[others])


def test_values_are_written_as_they_are(implementation):
    (qkv, pages, kv_locs, positions, inv_freq), static = small()
    _, pages = write((qkv, pages, kv_locs, positions, inv_freq), implementation, **static)
    page, offset = kv_locs[1, 2] // 16, kv_locs[1, 2] % 16
    v = qkv.reshape(2, 3, 8, 64)[1, 2, 6:]
    np.testing.assert_array_equal(pages[page, 1, :, offset], v)


def test_position_zero_without_norms_changes_nothing(implementation):
    (qkv, pages, kv_locs, positions, inv_freq), static = small(normed="")
    args = (qkv, pages, kv_locs, np.zeros_like(positions), inv_freq)
    q, _ = write(args, implementation, **static)
    np.testing.assert_array_equal(q, qkv.reshape(2, 3, 8, 64)[:, :, :4])


def test_padding_rows_that_collide_in_page_0_harm_no_other_row(implementation):
    (qkv, pages, kv_locs, positions, inv_freq), static = small()
    clean_q, clean = write((qkv, pages, kv_locs, positions, inv_freq), implementation, **static)
    kv_locs[1], qkv[1] = [0, 1, 1], np.nan
    q, collided = write((qkv, pages, kv_locs, positions, inv_freq), implementation, **static)
    np.testing.assert_array_equal(q[0], clean_q[0])
    pages_of_row_0, offsets = kv_locs[0] // 16, kv_locs[0] % 16
    np.testing.assert_array_equal(
        collided[pages_of_row_0, :, :, offsets], clean[pages_of_row_0, :, :, offsets]
    )


def test_pages_may_be_of_another_type(implementation):
    (qkv, pages, *rest), static = small()
    q, narrow = write((qkv, pages.astype(jnp.bfloat16), *rest), implementation, **static)
    assert (q.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    _, wide = write((qkv, pages, *rest), implementation, **static)
    assert testing.compare_results(narrow, wide.astype(jnp.bfloat16), wide) is None


def test_sixty_four_bit_types_change_nothing(implementation):
    args, static = small()
    with jax.enable_x64(True):
        wide = write(args, implementation, **static)
    jax.tree.map(np.testing.assert_array_equal, wide, write(args, implementation, **static))


def test_donated_pages_are_written_in_place():
    args, static = small()
    run = jax.jit(functools.partial(kv_write, **static), donate_argnums=1)
    text = run.lower(*args).compile().as_text()
    pool = "f32[" + ",".join(map(str, args[1].shape)) + "]"
    assert not [line for line in text.splitlines() if " copy(" in line and pool in line]
    kernel = functools.partial(kv_write, **static, implementation="triton")
    assert testing.lower_for_cuda(kernel, *args).count("output_operand_alias<") == 1


def test_all_of_it_is_one_launch():
    args, static = small()
    kernel = functools.partial(kv_write, **static, implementation="triton")
    assert testing.lower_for_cuda(kernel, *args).count("custom_call") == 1


def test_sin_and_cos_hold_over_a_long_context():
    angles = np.concatenate(
        [np.linspace(-10, 10, 4001), np.arange(131_072), np.arange(7) * np.pi / 4]
    ).astype(np.float32)
    sin, cos = jax.jit(triton.sin_cos)(angles)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), atol=4e-6)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), atol=4e-6)


def test_shapes_and_dtypes_are_checked():
    (qkv, pages, kv_locs, positions, inv_freq), static = small()
    run = functools.partial(kv_write, **static)
    wrong = [
        (cut(qkv, 2), pages, kv_locs, positions, inv_freq),
        (qkv, cut(pages, 2), kv_locs, positions, inv_freq),
        (qkv, pages, cut(kv_locs, 0), positions, inv_freq),
        (qkv, pages, kv_locs, cut(positions, 1), inv_freq),
        (qkv, pages, kv_locs, cut(positions, 0, "float32"), inv_freq),
        (qkv, pages, kv_locs, positions, cut(inv_freq, 0)),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            jax.eval_shape(run, *args)
    with pytest.raises(AssertionError):
        jax.eval_shape(
            functools.partial(run, q_norm=inv_freq), qkv, pages, kv_locs, positions, inv_freq
        )


def cut(x, axis, dtype=None):
    """x's shape, one shorter along an axis."""
    shape = [size - (i == axis) for i, size in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, dtype or x.dtype)


def test_head_sizes_that_triton_cannot_hold_are_refused():
    device = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
    choice = dispatch.pick("kv_write", device=device, head_dim=80)
    assert choice.name == "xla"
    assert "head_dim=80 is not a power of two from 16 to 256" in choice.reason
