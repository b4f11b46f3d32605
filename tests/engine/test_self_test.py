"""The self-test before serving: it runs the sizes in use and refuses a kernel that differs."""

import dataclasses

import jax
import pytest

from jaxspec.config import Kernels
from jaxspec.drafters.base import DrafterPlan
from jaxspec.engine.self_test import self_test_cases, self_test_kernels
from jaxspec.models.config import ModelConfig
from kernels_pallas import dispatch
from kernels_pallas.accept import triton as accept_triton
from kernels_pallas.few_row_gemm import many_rows
from tests.harness import make_geometry

MODEL = ModelConfig("llama", 32, 16, 32, 1, 2, 1, 16, 1e4, 1e-5, 64, True)
PLAN = DrafterPlan(
    params=(),
    feature_layers=(),
    block_size=8,
    kv_bytes_per_token=0,
    kernel_shapes={
        "paged_attention": {"heads": 2, "kv_heads": 1, "head_dim": 16},
        "kv_write_context": {"layers": 2, "kv_heads": 1, "head_dim": 16},
    },
    build=lambda target, page_size, kernels: None,
)


def geometry(**kernels: str):
    return make_geometry(page_size=16, kernels=Kernels(**kernels))


def test_the_cases_have_the_sizes_in_use():
    cases = self_test_cases(geometry(), MODEL, PLAN)
    assert [op for op, _ in cases] == [
        "resolve_prepare",
        "accept",
        "paged_attention",
        "kv_write",
        "filter_thresholds",
        "add_rms_norm",
        "few_row_gemm",
        "few_row_gemm",
        "paged_attention",
        "kv_write_context",
    ]
    verify, draft = (case for op, case in cases if op == "paged_attention")
    assert (verify.causal, draft.causal) == (True, False)
    assert (verify.block, verify.page_size, verify.head_dim) == (8, 16, 16)


def test_trees_are_tried_where_the_drafter_makes_them():
    cases = self_test_cases(geometry(), MODEL, PLAN._replace(tree_depth=3))
    assert {"accept_tree", "kv_move"} <= dict(cases).keys()
    assert [case.tree for op, case in cases if op == "paged_attention"] == [True, False]
    tried = geometry(accept_tree="triton_interpret", kv_move="triton_interpret")
    self_test_kernels(tried, MODEL, PLAN._replace(tree_depth=3))


MANY_ROWS = 12 if many_rows.loads_ahead(128) else 10


@pytest.mark.parametrize(("jax_version", "ahead"), [((0, 11, 2), 0), ((0, 12, 0), 4)])
def test_many_rows_are_tried_where_a_layer_is_large(monkeypatch, jax_version, ahead):
    monkeypatch.setattr(jax, "__version_info__", jax_version)  # few rows of large weights, too
    # At 128 rows there are other ways to go since jax 0.12; which cases there are, its import says.
    large = dataclasses.replace(MODEL, hidden_size=4096, intermediate_size=12288)
    for model, implementation, count in (
        (MODEL, "mosaic_gpu", 2),
        (large, "triton", 2),
        (large, "mosaic_gpu", MANY_ROWS + ahead),
    ):
        cases = self_test_cases(geometry(few_row_gemm=implementation), model, PLAN)
        assert [op for op, _ in cases].count("few_row_gemm") == count


def test_sound_kernels_pass_and_references_are_not_run():
    self_test_kernels(geometry(), MODEL, PLAN)
    self_test_kernels(geometry(accept="triton_interpret"), MODEL, PLAN)


def test_a_kernel_that_differs_is_refused_by_op_case_and_error(monkeypatch):
    sound = accept_triton.accept

    def off_by_one(*args, **kwargs):
        accepted = sound(*args, **kwargs)
        return accepted._replace(new_lens=accepted.new_lens + 1)

    monkeypatch.setattr(accept_triton, "accept", off_by_one)
    with pytest.raises(dispatch.UnsupportedKernel, match=r"accept: .* case 'in use'"):
        self_test_kernels(geometry(accept="triton_interpret"), MODEL, PLAN)
