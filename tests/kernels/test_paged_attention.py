from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch, early_launch, testing
from kernels_pallas.paged_attention import (
    cases,
    mosaic_block,
    mosaic_merge,
    paged_attention,
    plan_ahead,
    triton,
)
from kernels_pallas.paged_attention.plans import make_plan
from tests.kernels import attention_oracle, jitting

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0))

jitted = functools.cache(functools.partial(jitting.jit, paged_attention))


def attend(args, implementation, *, block_mask=None, **static):
    return np.asarray(jitted(implementation, **static)(*args, block_mask=block_mask))


@functools.cache
def expected(case):
    """The oracle's result, and the plain result in the case's own precision."""
    args, static = cases.make_inputs(case)
    exact = attention_oracle.attend(*args, **static)
    plain = exact if case.dtype == "float32" else attend(args, "xla", **static)
    return testing.array(exact, "float32"), testing.array(plain, case.dtype)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    assert testing.compare_results(attend(args, implementation, **static), plain, exact) is None


def small(**changes):
    """Arguments on the host, so that tests change them without compiling anything."""
    case = cases.Case("small", (5, 18), block=4, columns=4)._replace(**changes)
    args, static = cases.make_inputs(case)
    return tuple(np.array(each) for each in args), {**static, "scale": 0.5}


def test_nan_later_in_the_block_does_not_reach_earlier_queries(implementation):
    # A prompt's last tile: the request ends at query 1, what lies behind was never written.
    (q, kv_pages, page_table, lens), static = small()
    clean = attend((q, kv_pages, page_table, lens), implementation, **static)
    page, offset = page_table[1, 20 // 16], 20 % 16
    kv_pages[page, :, :, offset:] = np.nan
    out = attend((q, kv_pages, page_table, lens), implementation, **static)
    np.testing.assert_array_equal(out[1, :2], clean[1, :2])
    assert np.isnan(out[1, 2:]).all()


def test_nan_that_a_query_sees_reaches_it(implementation):
    (q, kv_pages, page_table, lens), static = small()
    kv_pages[page_table[1, 0], :, :, 3] = np.nan
    out = attend((q, kv_pages, page_table, lens), implementation, **static)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all() == (page_table[0, 0] != page_table[1, 0])


def test_a_query_whose_mask_is_empty_gets_zero(implementation):
    (q, kv_pages, page_table, _), _ = small()
    lens, mask = np.zeros(2, np.int32), np.zeros((2, 4, 1), np.uint32)
    out = attend((q, np.nan_to_num(kv_pages), page_table, lens), implementation, block_mask=mask)
    np.testing.assert_array_equal(out, np.zeros_like(q))


def test_scale_is_the_given_one(implementation):
    args, static = small()
    exact = testing.array(attention_oracle.attend(*args, **static), "float32")
    assert testing.compare_results(attend(args, implementation, **static), exact, exact) is None


def test_in_a_window_of_one_a_query_sees_only_itself(implementation):
    (q, kv_pages, page_table, lens), static = small(window=1)
    out = attend((q, kv_pages, page_table, lens), implementation, **static)
    for i in range(4):
        page, offset = page_table[1, (18 + i) // 16], (18 + i) % 16
        np.testing.assert_array_equal(out[1, i], kv_pages[page, 1, :, offset].repeat(2, axis=0))


def test_sixty_four_bit_types_change_nothing(implementation):
    args, static = small()
    with jax.enable_x64(True):
        wide = attend(args, implementation, **static)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, attend(args, implementation, **static))


def test_the_reference_reads_a_wide_table_only_as_far_as_it_is_used():
    (q, kv_pages, page_table, lens), static = small()
    # Ids out of range would be clamped to the last page, which holds NaN here.
    wide = np.concatenate([page_table, np.full((2, 4000), 10_000, np.int32)], axis=1)
    poisoned = np.concatenate([kv_pages, np.full((1, *kv_pages.shape[1:]), np.nan, np.float32)])
    run = jax.jit(functools.partial(paged_attention, **static))
    np.testing.assert_array_equal(
        run(q, poisoned, wide, lens), run(q, kv_pages, page_table[:, :4], lens)
    )
    assert "while(" in run.lower(q, poisoned, wide, lens).compile().as_text()


def plan_of(lens, shares, window=None, **least):
    """For rows of KV before a block of one, in tiles of 16."""
    lens = testing.array(lens, jnp.int32)
    made = make_plan(lens, block=1, window=window, tile=16, reach=2048, shares=shares, **least)
    return made.programs.tolist(), made.split_rows.tolist()


def test_equal_rows_that_fill_the_programs_stay_whole():
    programs, split_rows = plan_of([999, 999, 999], shares=2)
    assert programs == [[0, 0, 1, 999], [1, 0, 1, 999], [2, 0, 1, 999], [2, 1, 0, 999]]
    assert split_rows == [[0, 0, 0]]


def test_few_rows_are_split_evenly():
    programs, split_rows = plan_of([999, 998], shares=4)
    assert programs == [
        *([0, 0, 2, 999], [0, 1, 2, 999], [1, 0, 2, 998], [1, 1, 2, 998]),
        [1, 2, 0, 998],
    ]
    assert split_rows == [[0, 0, 2], [1, 2, 2]]


def test_one_long_row_among_short_ones_is_split():
    programs, split_rows = plan_of([127, 1023, 127], shares=10)
    assert [row for row, *_ in programs[:10]] == [0, *[1] * 8, 2]
    assert [splits for _, _, splits, _ in programs] == [1, *[8] * 8, 1, 0, 0]
    assert split_rows[0] == [1, 1, 8]


def test_no_split_is_empty():
    programs, _ = plan_of([0, 17], shares=16)
    assert [splits for _, _, splits, _ in programs] == [1, 2, 2, *[0] * 14]


def test_a_window_shortens_what_is_split():
    programs, _ = plan_of([999, 999], shares=8, window=16)
    assert [splits for _, _, splits, _ in programs] == [2, 2, 2, 2, *[0] * 5]


def test_the_layers_of_one_program_share_one_plan():
    make = functools.partial(make_plan, block=16, window=None, tile=64, reach=4096, shares=16)

    def instructions(layers):
        run = jax.jit(lambda lens: [make(lens) for _ in range(layers)])
        text = run.lower(shaped(8, dtype="int32")).compile().as_text()
        return text.count("reduce("), text.count("gather(")

    assert instructions(4) == instructions(1)


def test_a_part_without_a_tile_is_none():
    # 17 tiles in eight parts are three each, for six of them.
    programs, split_rows = plan_of([16 * 16], shares=8)
    assert [splits for _, _, splits, _ in programs] == [*[6] * 6, 0, 0]
    assert split_rows[0] == [0, 0, 6]


@pytest.mark.parametrize("least_tiles", [1, 2, 3])
@pytest.mark.parametrize(("rows", "shares"), [(23, 2), (23, 16), (1, 8), (3, 16)])
def test_every_tile_of_every_row_has_its_program(rows, shares, least_tiles):
    lens = np.random.default_rng(shares).integers(0, 1500, rows)
    programs, split_rows = plan_of(lens, shares, least_tiles=least_tiles)
    for row, length in enumerate(lens):
        mine = [(split, splits) for owner, split, splits, _ in programs if owner == row and splits]
        assert mine == [(split, len(mine)) for split in range(len(mine))]
        tiles = -(-(length + 1) // 16)
        each = -(-tiles // len(mine))
        assert (len(mine) - 1) * each < tiles, "no part is empty"
        assert len(mine) == 1 or each >= least_tiles
        first = next(at for at, program in enumerate(programs) if program[0] == row)
        assert ([row, first, len(mine)] in split_rows) == (len(mine) > 1)


@pytest.mark.parametrize(
    ("batch", "block", "kv_heads", "shares"),
    [(1, 1, 8, 16), (32, 16, 8, 16), (1, 64, 8, 4), (256, 1, 1, 32), (2, 1, 160, 1)],
)
def test_a_batch_is_cut_into_a_program_for_each_multiprocessor(batch, block, kv_heads, shares):
    config = triton.choose(batch, block, 4, kv_heads, 128, max_rows=8192, bits=16)
    assert config.shares == shares


def test_a_table_of_one_tile_is_not_cut():
    assert triton.choose(1, 16, 4, 8, 128, max_rows=64, bits=16).shares == 1


def test_rows_of_any_raggedness_are_put_together_again():
    case = cases.Case("ragged", (0, 100, 3, 31, 64), 2, columns=8)
    args, static = cases.make_inputs(case)
    exact = testing.array(attention_oracle.attend(*args, **static), "float32")
    config = triton.Config(16, 16, shares=5, num_warps=4, num_stages=2)
    run = functools.partial(triton.paged_attention, **static, config=config)
    out = jax.jit(functools.partial(run, scale=0.125, block_mask=None, interpret=True))(*args)
    assert testing.compare_results(out, exact, exact) is None


def test_a_window_and_a_block_mask_exclude_each_other():
    args, _ = small()
    mask = jnp.ones((2, 4, 1), jnp.uint32)
    with pytest.raises(ValueError, match="window=3 cannot be combined with a block mask"):
        paged_attention(*args, window=3, block_mask=mask)


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


Q, PAGES = shaped(2, 4, 2, 64), shaped(9, 2, 1, 16, 64)
TABLE, LENS = shaped(2, 4, dtype="int32"), shaped(2, dtype="int32")


@pytest.mark.parametrize(
    "args",
    [
        (shaped(2, 4, 2, 32), PAGES, TABLE, LENS),
        (shaped(2, 4, 3, 64), shaped(9, 2, 2, 16, 64), TABLE, LENS),
        (Q, shaped(9, 1, 1, 16, 64), TABLE, LENS),
        (Q, shaped(9, 2, 1, 16), TABLE, LENS),
        (Q, shaped(9, 2, 1, 16, 64, dtype="bfloat16"), TABLE, LENS),
        (Q, PAGES, shaped(1, 4, dtype="int32"), LENS),
        (Q, PAGES, shaped(2, 4), LENS),
        (Q, PAGES, TABLE, shaped(1, dtype="int32")),
        (Q, PAGES, TABLE, shaped(2)),
    ],
)
def test_shapes_and_dtypes_are_checked(args):
    assert jax.eval_shape(paged_attention, Q, PAGES, TABLE, LENS) == Q
    with pytest.raises(AssertionError):
        jax.eval_shape(paged_attention, *args)


@pytest.mark.parametrize("mask", [shaped(2, 4, 2, dtype="uint32"), shaped(2, 4, 1, dtype="int32")])
def test_a_block_mask_has_words_of_32_bits(mask):
    with pytest.raises(AssertionError):
        jax.eval_shape(
            lambda *args: paged_attention(*args[:-1], block_mask=args[-1]),
            *(Q, PAGES, TABLE, LENS, mask),
        )


# `cases.CASES`, which are lowered too, lack the first two.
LAYOUTS = list(itertools.product([(64, 128), (128, 64), (64, 16), (128, 32)], [1, 2, 3, 4, 8]))
DEFAULT = (((64, 128), 1), ((128, 64), 2))


@pytest.mark.parametrize(
    ("dim", "page_size", "group"),
    [
        pytest.param(*sizes, group, marks=() if (sizes, group) in DEFAULT else pytest.mark.nightly)
        for sizes, group in LAYOUTS
    ],
)
def test_every_group_and_head_size_lowers_for_cuda(dim, page_size, group):
    shapes = (
        shaped(4, 16, 2 * group, dim, dtype="bfloat16"),
        shaped(99, 2, 2, page_size, dim, dtype="bfloat16"),
        *(shaped(4, 32, dtype="int32"), shaped(4, dtype="int32")),
    )
    run = functools.partial(paged_attention, implementation="triton")
    assert testing.lower_for_cuda(run, *shapes).count("custom_call") == 2


@pytest.mark.parametrize(
    "kv_heads", [1, 3, *(pytest.param(heads, marks=pytest.mark.nightly) for heads in (5, 7, 12))]
)
def test_warps_are_a_power_of_two_whatever_the_number_of_shares(kv_heads):
    # Lowering takes any number; Triton itself, on the device, does not.
    shapes = (
        shaped(1, 1, kv_heads, 64, dtype="bfloat16"),
        shaped(99, 2, kv_heads, 16, 64, dtype="bfloat16"),
        *(shaped(1, 96, dtype="int32"), shaped(1, dtype="int32")),
    )
    run = functools.partial(paged_attention, implementation="triton")
    warps = [int(n) for n in re.findall(r"num_warps = (\d+)", testing.lower_for_cuda(run, *shapes))]
    assert len(warps) == 2
    assert set(warps) <= {1, 2, 4, 8}


def test_an_unknown_implementation_is_refused():
    args, _ = small()
    with pytest.raises(dispatch.UnsupportedKernel, match="'cuda' is unknown"):
        paged_attention(*args, implementation="cuda")


def test_head_sizes_that_triton_cannot_hold_are_refused():
    choice = dispatch.pick("paged_attention", device=H200, head_dim=96)
    assert choice.name == "xla"
    assert "head_dim=96 is not a power of two from 16 to 256" in choice.reason
    assert dispatch.pick("paged_attention", device=H200, head_dim=64).name == "triton"
    merges = early_launch.refuses_ahead(H200) is None
    name = dispatch.pick("paged_attention", device=H200, head_dim=128).name
    assert name == ("mosaic_gpu" if merges else "triton")


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_the_merge_in_mosaic_adds_up_the_same(case, monkeypatch):
    monkeypatch.setattr(mosaic_merge, "serves", lambda *_: True)
    if (refusal := dispatch.refuses_mosaic_gpu(H200)) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    actual = attend(args, "mosaic_gpu_interpret", **static)
    assert testing.compare_results(actual, plain, exact) is None


@pytest.mark.parametrize(
    "batch, block, dim, is_ahead",
    [(1, 16, 128, True), (16, 1, 128, True), (8, 16, 128, False), (1, 16, 64, False)],
)
def test_only_few_queries_of_whole_heads_are_merged_in_mosaic(batch, block, dim, is_ahead):
    # A program a query row and head: at 8 x 16 those of a step took 17 us for Triton's 5. And a
    # GPU's compiler finds no layout for heads of 64.
    if (refusal := dispatch.refuses_mosaic_gpu(H200)) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")
    # With a window Triton attends.
    case = cases.bench_case(batch, block, context=512)._replace(head_dim=dim, window=99)
    args, static = cases.make_inputs(case)
    run = functools.partial(paged_attention, **static, implementation="mosaic_gpu")
    text = testing.lower_for_cuda(run, *args)
    assert ("mosaic_gpu" in text) == is_ahead


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_the_merge_in_mosaic_is_right_on_the_device(case, monkeypatch):
    monkeypatch.setattr(mosaic_merge, "serves", lambda *_: True)
    refuses = dispatch.op_module("paged_attention").BACKENDS["mosaic_gpu"]
    if (refusal := refuses(dispatch.Device.current(), case._asdict())) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")
    args, static = cases.make_inputs(case)
    assert testing.compare(paged_attention, args, static, "mosaic_gpu") is None


@pytest.mark.parametrize(
    "programs, case",
    [
        (3, cases.Case("turns", (150, 3, 64), 16, 4, 2, 128, 16, 12, "bfloat16")),
        pytest.param(
            132,
            cases.Case("turns", (700, *range(3, 43, 2)), 16, 32, 8, 128, 64, 12, "bfloat16"),
            marks=pytest.mark.gpu,
        ),
    ],
    ids=["interpreted", "on the device"],
)
@pytest.mark.parametrize("shares", [1, 16])
def test_a_program_of_mosaic_takes_row_after_row_and_stage_after_stage(
    programs, case, shares, monkeypatch
):
    on_gpu = jax.default_backend() == "gpu"
    device = dispatch.Device.current() if on_gpu else H200
    if (refusal := early_launch.refuses_ahead(device)) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")
    monkeypatch.setattr(mosaic_block.limits, "MULTIPROCESSORS", programs)
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    config = mosaic_block.Config(shares, num_stages=2)
    run = functools.partial(
        mosaic_block.paged_attention,
        causal=static["causal"],
        scale=case.head_dim**-0.5,
        config=config,
        interpret=not on_gpu,
    )
    assert testing.compare_results(jax.jit(run)(*args), plain, exact) is None
    plan = mosaic_block.make_plan(args[0].shape, args[1].shape, *args[2:], config)
    assert (plan.programs[:, 2] > 1).any() == (shares > 1)
    places = np.count_nonzero(plan.programs[:, 2]) * case.kv_heads
    assert places > programs, "so that one takes two"


@pytest.mark.parametrize(
    "changes, is_block",
    [
        ({}, True),
        ({"lens": (496,) * 32}, True),
        ({"lens": (496,) * 33}, False),
        ({"head_dim": 64}, False),
        ({"block": 1}, False),
        ({"block": 12}, False),
        ({"block": 32}, False),
        ({"window": 9}, False),
        ({"tree": True}, False),
        ({"dtype": "float32"}, False),
        ({"page_size": 16}, True),
    ],
)
def test_what_asks_for_kv_before_q(changes, is_block):
    if (refusal := early_launch.refuses_ahead(H200)) is not None:
        pytest.skip(f"lacks what the kernel needs: {refusal}")
    case = cases.bench_case(2, 16, context=512)._replace(**changes)
    (q, *rest), static = cases.make_inputs(case)
    static.pop("causal")
    made = plan_ahead(q, *rest, **static, implementation="mosaic_gpu")
    assert (made is not None) == is_block
    assert plan_ahead(q, *rest, **static, implementation="triton") is None
