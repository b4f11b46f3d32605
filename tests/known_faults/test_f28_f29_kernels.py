"""F28, F29: odd sizes of the relay's kernels, and a GPU that Pallas does not support."""

import dataclasses

import pytest

from jaxspec.drafters.base import DrafterSetup
from jaxspec.drafters.none import plan_none
from jaxspec.engine.assemble import choose_dtype
from jaxspec.engine.parts import choose_kernels
from kernels_pallas import dispatch, early_launch
from kernels_pallas.dispatch import Device, UnsupportedKernel
from kernels_pallas.resolve_prepare.cases import make_case
from tests.engine.test_self_test import MODEL

T4 = Device("gpu", "Tesla T4", (7, 5))
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
H200 = Device("gpu", "NVIDIA H200", (9, 0))
PLAN = plan_none(DrafterSetup(None, MODEL, "float16", None))


@pytest.mark.parametrize(("rows", "block"), [(1, 4), (3, 7), (5, 16), (17, 7)], ids=str)
def test_rows_and_blocks_that_no_tile_divides(rows, block):
    """F28: the last tile is partly outside; every case is lowered for CUDA in `tests/kernels`."""
    case = make_case("odd", rows, block_size=block, page_size=4, num_pages=5)
    dispatch.self_test("resolve_prepare", "triton_interpret", case)


def test_a_t4_gets_float16_and_the_references_and_is_told_why():
    """F29: each choice is a line of the table printed at start."""
    assert choose_dtype("auto", T4) == ("float16", "auto: Tesla T4 has no bfloat16")
    kernels, choices = choose_kernels("auto", T4, MODEL, PLAN, "float16")
    for op, choice in choices.items():
        if op in dispatch.ops():
            assert getattr(kernels, op) == "xla"
            assert "not triton, since compute capability 7.5 < 8.0" in choice.reason
            assert "jax" not in choice.reason


def test_a_kernel_asked_for_on_a_t4_is_refused():
    """F29: a sentence at start instead of a failed precondition in the first step."""
    with pytest.raises(UnsupportedKernel, match=r"cannot run on Tesla T4, since compute"):
        choose_kernels("triton", T4, MODEL, PLAN, "float16")


@pytest.mark.parametrize(("target", "drafter"), [(128, 64), (64, 128)])
def test_target_and_drafter_share_an_implementation_that_takes_both(monkeypatch, target, drafter):
    """F28: the merge in Mosaic takes heads of 128 alone, whichever of the two has others."""
    monkeypatch.setattr(early_launch, "refuses_ahead", lambda device: None)
    model = dataclasses.replace(MODEL, head_dim=target)
    plan = PLAN._replace(kernel_shapes={"paged_attention": {"head_dim": drafter}})
    kernels, _ = choose_kernels("auto", H200, model, plan, "bfloat16")
    assert kernels.paged_attention == "triton"
    same = dataclasses.replace(model, head_dim=128), plan._replace(kernel_shapes={})
    kernels, _ = choose_kernels("auto", H200, *same, "bfloat16")
    assert kernels.paged_attention == "mosaic_gpu"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_gpu_too_old_is_told_so_before_its_jax(head_dim):
    """F29: no newer jax would help there."""
    choice = dispatch.pick("paged_attention", device=A100, head_dim=head_dim)
    assert choice.name == "triton"
    assert "jax" not in choice.reason
