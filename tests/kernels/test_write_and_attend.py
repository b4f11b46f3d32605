from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch, testing
from kernels_pallas.kv_write import kv_write
from kernels_pallas.write_and_attend import cases, serves, triton, write_and_attend
from tests.kernels import attention_oracle, jitting, kv_oracle

jitted = functools.cache(functools.partial(jitting.jit, write_and_attend))
jitted_kv_write = functools.cache(functools.partial(jitting.jit, kv_write))
ARRAYS = ("q_norm", "k_norm", "layer", "block_mask")
OF_ATTENTION = ("causal", "window", "block_mask")
QUICK = ("block of 16, bfloat16",)


def run(args, implementation, **static):
    arrays = {name: static.pop(name) for name in ARRAYS if name in static}
    return jax.tree.map(np.asarray, jitted(implementation, **static)(*args, **arrays))


def of_writing(static):
    return {name: value for name, value in static.items() if name not in OF_ATTENTION}


@functools.cache
def expected(case):
    """The oracle's result and pages, and the plain ones in the case's own precision."""
    args, static = cases.make_inputs(case)
    of_attention = {name: static[name] for name in OF_ATTENTION if name in static}
    q, kv_pages = kv_oracle.write(*args[:5], **of_writing(static))
    out = attention_oracle.attend(q, kv_pages, *args[5:], **of_attention)
    exact = tuple(testing.array(each, "float32") for each in (out, kv_pages))
    return exact, exact if case.dtype == "float32" else run(args, "xla", **static)


def runs():
    """Each case on the device, in the interpreter and plain; most of the latter nightly."""
    for case in cases.CASES:
        for implementation in ("xla", "triton_interpret", "triton"):
            if implementation == "triton":
                marks = (pytest.mark.gpu,)
            else:
                marks = () if case.name in QUICK else (pytest.mark.nightly,)
            name = f"{case.name}-{implementation}"
            yield pytest.param(case, implementation, id=name, marks=marks)


@pytest.mark.parametrize(("case", "implementation"), list(runs()), indirect=["implementation"])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    result = run(args, implementation, **static)
    assert testing.compare_results(result, plain, exact) is None
    # What a later step reads must not depend on which of the two ways wrote it.
    static = of_writing(static)
    arrays = {name: static.pop(name) for name in ARRAYS if name in static}
    _, kv_pages = jitted_kv_write(implementation, **static)(*args[:5], **arrays)
    differs = np.abs(np.asarray(kv_pages, np.float32) - np.asarray(result[1], np.float32))
    assert np.nanmax(differs) <= (2e-6 if case.dtype == "float32" else 0)


def small(**changes):
    """Arguments on the host, so that tests change them without compiling anything."""
    case = cases.Case("small", (5, 18), block=4, columns=4)._replace(**changes)
    args, static = cases.make_inputs(case)
    return [np.array(each) for each in args], static


@pytest.mark.nightly
def test_a_token_of_nan_reaches_those_that_see_it_and_its_row_of_the_pages():
    (qkv, *rest), static = small()
    clean, clean_pages = run((qkv, *rest), "triton_interpret", **static)
    qkv[1, 2] = np.nan
    out, pages = run((qkv, *rest), "triton_interpret", **static)
    np.testing.assert_array_equal(out[0], clean[0])
    np.testing.assert_array_equal(out[1, :2], clean[1, :2])
    assert np.isnan(out[1, 2:]).all()
    page, offset = divmod(int(rest[1][1, 2]), 16)
    assert np.isnan(pages[page, :, :, offset]).all()
    clean_pages = clean_pages.copy()
    clean_pages[page, :, :, offset] = np.nan
    np.testing.assert_array_equal(pages[1:], clean_pages[1:])


@pytest.mark.nightly
def test_padding_rows_that_collide_in_page_0_harm_no_other_row():
    (qkv, pages, kv_locs, *rest), static = small()
    clean, clean_pages = run((qkv, pages, kv_locs, *rest), "triton_interpret", **static)
    kv_locs[1], qkv[1] = [0, 1, 1, 0], np.nan
    out, collided = run((qkv, pages, kv_locs, *rest), "triton_interpret", **static)
    np.testing.assert_array_equal(out[0], clean[0])
    page, offset = kv_locs[0] // 16, kv_locs[0] % 16
    np.testing.assert_array_equal(collided[page, :, :, offset], clean_pages[page, :, :, offset])


@pytest.mark.nightly
def test_sixty_four_bit_types_change_nothing():
    args, static = small()
    with jax.enable_x64(True):
        wide = run(args, "triton_interpret", **static)
    for one, other in zip(wide, run(args, "triton_interpret", **static), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


ADDED_UP = {"tokens": 1, "tile_merge": None}
LAUNCHES = {
    "whole rows": {"tokens": 1, "shares": 1},
    "a merge of its own": {"tile_merge": 4},
    "the last to end adds up": ADDED_UP,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if changes is ADDED_UP else pytest.mark.nightly)
        for name, changes in LAUNCHES.items()
    ],
)
def test_rows_of_any_raggedness_are_put_together_again(changes):
    case = cases.Case("ragged", (0, 100, 3, 31, 64), 2)
    args, static = cases.make_inputs(case)
    config = triton.Config(2, 16, shares=5, num_warps=4, num_stages=2)._replace(**changes)
    how = {"layer": None, "scale": 0.125, "block_mask": None, "interpret": True, "config": config}
    out = jax.jit(functools.partial(triton.write_and_attend, **static, **how))(*args)
    exact, _ = expected(case)
    assert testing.compare_results(out, exact, exact) is None


def lowered(block, dtype="bfloat16", heads=4, kv_heads=1, dim=64, page_size=64, **static):
    shapes = (
        shaped(2, block, (heads + 2 * kv_heads) * dim, dtype=dtype),
        shaped(99, 2, kv_heads, page_size, dim, dtype=dtype),
        *(shaped(2, block, dtype="int32") for _ in range(2)),
        shaped(dim // 2),
        shaped(2, 32, dtype="int32"),
        shaped(2, dtype="int32"),
    )
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "implementation": "triton"}
    return testing.lower_for_cuda(functools.partial(write_and_attend, **sizes, **static), *shapes)


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_few_queries_are_one_launch_and_the_pages_stay_in_place():
    one, two = lowered(1), lowered(16)
    assert one.count("custom_call") == 1
    assert one.count("output_operand_alias<") == 2  # the pages, and counts of what has ended
    assert two.count("custom_call") == 2
    assert two.count("output_operand_alias<") == 2  # the pages, and the result that merging fills


@pytest.mark.nightly
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "page_size"), [(64, 128), (128, 64), (64, 16), (128, 32)])
def test_every_group_and_head_size_lowers_for_cuda(dim, page_size, group):
    sizes = {"heads": 2 * group, "kv_heads": 2, "dim": dim, "page_size": page_size}
    for block in (1, 8, 16):
        assert "write_and_attend" in lowered(block, **sizes)


@pytest.mark.parametrize(
    ("tokens", "group", "heads"), [(1, 4, 16), (4, 3, 4), (8, 1, 2), (8, 8, 8)]
)
def test_query_rows_are_tokens_times_heads(tokens, group, heads):
    assert triton.heads_of(tokens, group) == heads


@pytest.mark.parametrize(
    ("batch", "block", "group", "kv_heads", "dim", "launch"),
    [
        (1, 1, 4, 8, 128, (1, 16, None)),
        (8, 1, 4, 8, 128, (1, 16, None)),
        (1, 16, 4, 8, 128, (16, 16, 2)),
        (1, 1, 3, 3, 64, (1, 32, None)),
        (1, 8, 3, 3, 64, (2, 16, None)),
        (8, 8, 3, 3, 64, (8, 32, 2)),
        (2, 1, 1, 160, 64, (1, 1, 2)),
    ],
)
def test_the_last_to_end_adds_up_where_that_is_little(batch, block, group, kv_heads, dim, launch):
    config = triton.choose(batch, block, group, kv_heads, dim, max_rows=2048, bits=16)
    assert (config.tokens, config.shares, config.tile_merge) == launch


def test_longer_blocks_are_not_served():
    assert serves(16, "triton") and serves(1, "triton_interpret")
    assert not serves(17, "triton")
    assert not serves(1, "xla")
    with pytest.raises(ValueError, match="a block of 17 tokens is above 16; take kv_write and"):
        lowered(17)


def test_a_window_and_a_block_mask_exclude_each_other():
    args, static = small()
    static |= {"window": 3, "block_mask": jnp.ones((2, 4, 1), jnp.uint32)}
    with pytest.raises(ValueError, match="window=3 cannot be combined with a block mask"):
        write_and_attend(*args, **static)


def test_shapes_and_dtypes_are_checked():
    args, static = small()
    check = functools.partial(write_and_attend, **static)
    jax.eval_shape(check, *args)
    wrong = [
        (at, jax.ShapeDtypeStruct(np.delete(args[at], 0, axis).shape, args[at].dtype))
        for at, axis in ((0, 2), (1, 2), (2, 0), (3, 1), (4, 0), (5, 0), (6, 0))
    ]
    wrong += [(at, jax.ShapeDtypeStruct(args[at].shape, "float16")) for at in range(1, 7)]
    for at, value in wrong:
        with pytest.raises(AssertionError):
            jax.eval_shape(check, *args[:at], value, *args[at + 1 :])
    for name, shape, dtype in (
        ("q_norm", (63,), "float32"),
        ("layer", (2,), "int32"),
        ("block_mask", (2, 4, 2), "uint32"),
        ("block_mask", (2, 4, 1), "int32"),
    ):
        with pytest.raises(AssertionError):
            jax.eval_shape(
                lambda *args, name=name: check(*args[:-1], **{name: args[-1]}),
                *args,
                jax.ShapeDtypeStruct(shape, dtype),
            )


def test_head_sizes_that_triton_cannot_hold_are_refused():
    device = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
    choice = dispatch.pick("write_and_attend", device=device, head_dim=80)
    assert choice.name == "xla"
    assert "head_dim=80 is not a power of two from 16 to 256" in choice.reason
