"""Every kernel, for every case of its op, is lowered for CUDA on a machine without a GPU."""

from __future__ import annotations

import functools

import jax
import pytest

from kernels_pallas import dispatch, testing

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
ONE_LAUNCH = ("resolve_future", "dflash_prepare_block", "resolve_prepare", "accept", "accept_tree")


def lower(op, backend, case):
    args, static = dispatch.cases_module(op).make_inputs(case)
    run = functools.partial(dispatch.function(op), **static, implementation=backend)
    return testing.lower_for_cuda(run, *args)


@pytest.mark.parametrize("op", dispatch.ops())
def test_every_case_of_every_backend_lowers_for_cuda(op):
    for backend, refuses in dispatch.op_module(op).BACKENDS.items():
        for case in dispatch.cases_module(op).CASES:
            if refuses(H200, case._asdict()) is not None:  # for Mosaic this jax may be too old
                continue
            assert "custom_call" in lower(op, backend, case), (backend, case.name)


@pytest.mark.parametrize("op", ONE_LAUNCH)
def test_the_kernel_lowers_with_64_bit_tokens_in_one_launch(op):
    with jax.enable_x64(True):
        for case in dispatch.cases_module(op).CASES[::2]:
            assert lower(op, "triton", case).count("custom_call") == 1


def test_poison_is_written_in_place():
    from kernels_pallas.resolve_prepare import cases

    case = cases.make_case("poisoned", 2, poison=True)
    assert lower("resolve_prepare", "triton", case).count("output_operand_alias<") == 2
