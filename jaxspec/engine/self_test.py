"""Runs each chosen kernel beside its reference before serving, for the shapes in use."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxspec.config import Geometry
from jaxspec.drafters.base import DrafterPlan
from jaxspec.engine.compile_ahead import run_side_by_side
from jaxspec.models.config import ModelConfig
from kernels_pallas import dispatch
from kernels_pallas.accept import cases as accept_cases
from kernels_pallas.add_rms_norm import cases as add_rms_norm_cases
from kernels_pallas.few_row_gemm import MAX_ROWS, loads_ahead, parts_for
from kernels_pallas.few_row_gemm import cases as few_row_gemm_cases
from kernels_pallas.filter_thresholds import cases as filter_cases
from kernels_pallas.kv_move import cases as kv_move_cases
from kernels_pallas.kv_write import cases as kv_write_cases
from kernels_pallas.kv_write_context import cases as kv_write_context_cases
from kernels_pallas.paged_attention import cases as attention_cases
from kernels_pallas.resolve_prepare import cases as resolve_cases


def self_test_kernels(geometry: Geometry, model: ModelConfig, plan: DrafterPlan) -> None:
    """Checks every kernel that is not a reference already, side by side: compiling takes the time.

    Raises:
        UnsupportedKernel: a kernel differs from its reference here; names op, case and error.
    """
    is_wide = jax.config.jax_enable_x64

    def check(op: str, case: Any) -> None:
        with jax.enable_x64(is_wide):  # which a caller may have said for its own thread
            dispatch.self_test(op, getattr(geometry.kernels, op), case)

    run_side_by_side(
        functools.partial(check, op, case)
        for op, case in self_test_cases(geometry, model, plan)
        if getattr(geometry.kernels, op) != dispatch.XLA
    )


def self_test_cases(
    geometry: Geometry, model: ModelConfig, plan: DrafterPlan
) -> list[tuple[str, Any]]:
    """(op, case) of an engine's sizes: a decode batch of it, with a short and a long row."""
    block, page = geometry.block_size, geometry.page_size
    columns = geometry.pages_per_slot
    longest = min(columns * page - block, geometry.max_model_len - 1)
    heads = {
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "page_size": page,
        "dtype": geometry.dtype,
    }
    drafter, is_tree = plan.kernel_shapes, plan.tree_depth is not None
    verified = accept_cases.Case("in use", 3, block, geometry.max_stop_ids, model.vocab_size)
    cases: list[tuple[str, Any]] = [
        (
            "resolve_prepare",
            resolve_cases.make_case(
                "in use",
                3,
                vocab_size=model.vocab_size,
                block_size=block,
                page_size=page,
                num_pages=columns,
            ),
        ),
        ("accept", verified),
        (
            "paged_attention",
            attention_cases.Case(
                "verify, in use",
                (1, page, min(longest, 700)),
                block,
                columns=columns,
                tree=is_tree,
                **heads,
            ),
        ),
        ("kv_write", kv_write_cases.Case("in use", 3, block, normed="qk" * model.qk_norm, **heads)),
        ("filter_thresholds", filter_cases.Case("in use", 6, 2, model.vocab_size)),
        *_layer_cases(geometry, model),
    ]
    if plan.tree_depth is not None:
        cases.append(("accept_tree", verified))
        moved = kv_move_cases.Case(
            "in use",
            3,
            nodes=block,
            width=plan.tree_depth,
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=page,
            dtype=geometry.dtype,
        )
        cases.append(("kv_move", moved))
    if "paged_attention" in drafter:
        cases.append(
            (
                "paged_attention",
                attention_cases.Case(
                    "draft, in use",
                    (1, page, min(longest, 700)),
                    block,
                    columns=columns,
                    causal=False,
                    page_size=page,
                    dtype=geometry.dtype,
                    **drafter["paged_attention"],
                ),
            )
        )
    if "kv_write_context" in drafter:
        cases.append(
            (
                "kv_write_context",
                kv_write_context_cases.Case(
                    "in use",
                    3,
                    block,
                    page_size=page,
                    dtype=geometry.dtype,
                    **drafter["kv_write_context"],
                ),
            )
        )
    return cases


def _layer_cases(geometry: Geometry, model: ModelConfig) -> list[tuple[str, Any]]:
    rows, width = min(3 * geometry.block_size, MAX_ROWS), model.hidden_size
    # Fewer rows of gate and up than the model has, so that the host need not make so many numbers.
    inner = min(model.intermediate_size, 1024)
    dtype = geometry.dtype
    gemm = few_row_gemm_cases.Case
    implementation = geometry.kernels.few_row_gemm
    gate_up = 128, model.intermediate_size, width
    serves_many = parts_for(*gate_up, swiglu=True, implementation=implementation)
    large = few_row_gemm_cases.MANY_ROWS_CASES if serves_many else ()
    if loads_ahead(*gate_up[1:], implementation=implementation):
        large += few_row_gemm_cases.AHEAD_CASES
    return [
        ("add_rms_norm", add_rms_norm_cases.Case("in use", rows, width, dtype)),
        (
            "few_row_gemm",
            gemm("o, in use", rows, width, model.num_heads * model.head_dim, dtype=dtype),
        ),
        (
            "few_row_gemm",
            gemm("gate_up, in use", rows, inner, width, swiglu=True, dtype=dtype),
        ),
        *(("few_row_gemm", each._replace(dtype=dtype)) for each in large),
    ]
