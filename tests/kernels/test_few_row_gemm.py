from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch, early_launch, testing
from kernels_pallas.few_row_gemm import (
    cases,
    few_row_gemm,
    launches_early,
    many_rows,
    mosaic_few_rows,
    mosaic_gpu,
    parts_for,
    triton,
)
from tests.kernels import jitting

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
A100 = dispatch.Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))


def oracle(x, weight, residual, *, swiglu, num_parts=1):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    if num_parts > 1:
        cut = (np.split(each, num_parts, axis=1) for each in (x, weight))
        return np.stack([oracle(*part, None, swiglu=False) for part in zip(*cut, strict=True)])
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
    case = cases.Case("split", num_rows, 72, 192)
    args, static = cases.make_inputs(case)
    # 64 columns each, which leaves the last none.
    config = triton.Config(64, 32, 4, 2, True, splits=4)
    run = functools.partial(triton.few_row_gemm, **static, interpret=True, config=config)
    exact = testing.array(oracle(*args, **static), "float32")
    parts = jax.jit(run)(*args)
    assert parts.shape == (4, num_rows, 72)
    assert testing.compare_results(parts.sum(axis=0), exact, exact) is None


def test_stages_shrink_to_what_shared_memory_holds():
    # 64 rows of x and 64 of the weight, 128 columns of 2 bytes: 32 KiB a step, of 227 KiB.
    assert triton.choose(16, 4096, 4096, swiglu=False, bits=16).num_stages == 8
    assert triton.choose(64, 4096, 4096, swiglu=False, bits=16).num_stages == 6


def test_more_rows_than_a_kernel_is_for_are_refused():
    assert dispatch.pick("few_row_gemm", device=A100, num_rows=64).name == "triton"
    choice = dispatch.pick("few_row_gemm", device=A100, num_rows=65)
    assert choice.name == "xla"
    assert "num_rows=65 is above 64" in choice.reason
    choice = dispatch.pick("few_row_gemm", device=H200, num_rows=200)
    assert choice.name == "xla"
    if dispatch.refuses_mosaic_gpu(H200) is None:
        assert "num_rows=200 is none of 128, 256, 512" in choice.reason
        assert dispatch.pick("few_row_gemm", device=H200).name == "mosaic_gpu"


def test_each_product_goes_where_it_is_fastest():
    def parts(num_rows, *sizes, implementation="mosaic_gpu", **more):
        return parts_for(num_rows, *sizes, implementation=implementation, **more)

    qkv, o, down = (6144, 4096), (4096, 4096), (4096, 12288)
    assert parts(17, *o, may_split=True) == parts(1, 576, 576, may_split=True) == 1
    assert parts(64, *o) == parts(64, *o, implementation="triton") == 1
    assert parts(64, *o, implementation="xla") == parts(128, *qkv, implementation="triton") == 0
    ahead = many_rows.loads_ahead(128)
    assert parts(128, *o, may_split=True) == (1 if ahead else 2)
    assert parts(128, *down, may_split=True) == (4 if ahead else 2)
    assert parts(256, *down, may_split=True) == 2
    assert parts(128, *qkv) == parts(256, *o, may_split=True) == parts(256, *qkv) == 1
    assert parts(128, 12288, 4096, swiglu=True) == parts(256, 12288, 4096, swiglu=True) == 1
    # Too few tiles or too many, rows that were not measured, a program with too many columns.
    assert parts(128, *o) == (1 if ahead else 0)
    assert parts(128, 10240, 4096) == parts(128, 576, 576, swiglu=True) == 0
    assert parts(96, *qkv) == parts(512, *qkv) == parts(128, 6144, 8256) == 0


@pytest.mark.parametrize("case", cases.MANY_ROWS_CASES, ids=lambda case: case.name)
def test_cases_of_many_rows_go_each_their_way(case):
    sizes = (case.num_rows, case.outputs, case.width)
    split = {"swiglu": case.swiglu, "may_split": case.num_parts > 1}
    assert parts_for(*sizes, **split, implementation="mosaic_gpu") == case.num_parts


@pytest.mark.parametrize("case", cases.AHEAD_CASES, ids=lambda case: case.name)
def test_large_weights_are_asked_for_before_the_kernel_ahead_has_ended(case):
    lacks_mosaic(H200, early_launch.refuses_ahead)
    sizes = (case.num_rows, case.outputs, case.width)
    split = {"swiglu": case.swiglu, "may_split": case.num_parts > 1}
    assert parts_for(*sizes, **split, implementation="mosaic_gpu") == case.num_parts
    text = lowered(case, early_launch=True)
    assert text.count("custom_call") == 1 and "mosaic_gpu" in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.AHEAD_CASES, ids=lambda case: case.name)
def test_large_weights_are_right_on_the_device(case):
    lacks_mosaic(dispatch.Device.current(), early_launch.refuses_ahead)
    args, static = cases.make_inputs(case)
    assert testing.compare(few_row_gemm, args, static, "mosaic_gpu") is None


@pytest.mark.nightly
@pytest.mark.parametrize("case", cases.MANY_ROWS_CASES, ids=lambda case: case.name)
def test_many_rows_lower_for_cuda(case):
    lacks_mosaic(H200)
    text = lowered(case)
    assert text.count("custom_call") == 1
    is_mosaic = case.swiglu or case.num_rows == 256 or many_rows.loads_ahead(case.num_rows)
    assert ("mosaic_gpu" in text) == is_mosaic


def test_what_xla_multiplies_or_loads_nothing_ahead_is_not_launched_early():
    o, gate_up = (4096, 4096), {"outputs": 12288, "width": 4096, "swiglu": True}
    ahead = many_rows.loads_ahead(128)
    assert ahead == (jax.__version_info__ >= (0, 12))
    assert all(launches_early(n, *o, implementation="triton") for n in (1, 64))
    many = {"implementation": "mosaic_gpu", "attends_ahead": True}
    assert launches_early(128, *o, **many) == ahead
    assert launches_early(128, **gate_up, **many) == ahead
    for num_rows in (65, 256, 512):
        assert not launches_early(num_rows, **gate_up, **many)
    assert not launches_early(128, *o, implementation="mosaic_gpu")
    assert not launches_early(128, *o, implementation="triton", attends_ahead=True)
    assert not launches_early(128, 10240, 4096, **many)
    assert not launches_early(1, *o, implementation="xla")


@pytest.mark.parametrize(
    ("num_rows", "config", "swiglu"),
    [
        # One row and 17: the copy engine fills a tile's other rows with zeros.
        (1, (64, 3, 2), False),
        (17, (64, 2, 3, 2), False),
        (8, (64, 2, 2), True),
        (64, (32, 3, 4, 1, 2), True),
    ],
)
def test_few_rows_multiply_tile_after_tile(monkeypatch, num_rows, config, swiglu):
    lacks_mosaic(H200)
    config = mosaic_few_rows.Config(*config)
    # So few programs that each takes several tiles, and some one more than others.
    monkeypatch.setattr(mosaic_few_rows, "_MULTIPROCESSORS", 2)
    case = cases.Case("few", num_rows, 320, 256, swiglu=swiglu, dtype="bfloat16")
    (x, weight, _), static = cases.make_inputs(case._replace(num_parts=config.splits))
    actual = mosaic_few_rows.few_row_gemm(x, weight, swiglu=swiglu, config=config, interpret=True)
    plain, exact = (
        few_row_gemm(*args, **static) for args in ((x, weight), testing.widen((x, weight)))
    )
    assert actual.shape == plain.shape
    assert testing.compare_results(actual, plain, exact) is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_rows", "config", "swiglu"),
    [
        (128, (64, 64, 3), True),
        (256, (96, 64, 2), True),
        (256, (64, 64, 4, 2), False),
        (512, (128, 64, 4, 1, 1), True),
    ],
)
def test_mosaic_multiplies_tile_after_tile(monkeypatch, num_rows, config, swiglu):
    lacks_mosaic(H200)
    config = mosaic_gpu.Config(*config)
    # So few programs that each takes several tiles, and some one more than others.
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 3)
    case = cases.Case(
        "many rows",
        num_rows,
        192 if config.tile_n == 96 else 256,
        512,
        swiglu=swiglu,
        dtype="bfloat16",
        num_parts=config.splits,
    )
    (x, weight, _), static = cases.make_inputs(case)
    actual = mosaic_gpu.few_row_gemm(x, weight, swiglu=swiglu, config=config, interpret=True)
    plain, exact = (
        few_row_gemm(*args, **static) for args in ((x, weight), testing.widen((x, weight)))
    )
    assert testing.compare_results(actual, plain, exact) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MANY_ROWS_CASES, ids=lambda case: case.name)
def test_many_rows_are_right_on_the_device(case):
    lacks_mosaic(dispatch.Device.current())
    args, static = cases.make_inputs(case)
    assert testing.compare(few_row_gemm, args, static, "mosaic_gpu") is None


def lowered(case, **static):
    """What Mosaic's name stands for, lowered for CUDA."""
    rows = case.outputs * (2 if case.swiglu else 1)
    args = [jax.ShapeDtypeStruct((each, case.width), case.dtype) for each in (case.num_rows, rows)]
    static |= {"swiglu": case.swiglu, "num_parts": case.num_parts, "implementation": "mosaic_gpu"}
    return testing.lower_for_cuda(functools.partial(few_row_gemm, **static), *args)


def lacks_mosaic(device, refuses=dispatch.refuses_mosaic_gpu):
    if (refusal := refuses(device)) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")


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
    with pytest.raises(AssertionError):
        few_row_gemm(x, weight, num_parts=3)
    for epilogue in ({"swiglu": True}, {"residual": residual}):
        with pytest.raises(AssertionError, match="parts have no epilogue"):
            few_row_gemm(x, weight, num_parts=2, **epilogue)
