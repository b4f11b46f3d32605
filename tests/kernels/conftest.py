"""Every kernel test is written once, against an implementation of the op."""

from __future__ import annotations

import jax
import pytest

from kernels_pallas import dispatch


@pytest.fixture(
    params=[
        "xla",
        "triton_interpret",
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def implementation(request):
    """The reference, the kernel in JAX's interpreter, and the kernel on the device."""
    if request.param == "triton":
        refusal = dispatch.refuses_triton(dispatch.Device.current())
        if refusal is not None:
            pytest.skip(f"lacks a GPU for the kernel: {refusal}")
    return request.param


def pytest_generate_tests(metafunc):
    """Runs each of a module's `cases.CASES` with 32-bit tokens, and every third with 64-bit ones.

    A program is compiled for each; the width changes types alone, not the way through the code.
    """
    if {"case", "token_width"} <= set(metafunc.fixturenames):
        cases = metafunc.module.cases.CASES
        params = [(case, 32) for case in cases] + [(case, 64) for case in cases[::3]]
        ids = [f"{case.name}, {width} bits" for case, width in params]
        metafunc.parametrize(("case", "token_width"), params, ids=ids, indirect=["token_width"])


@pytest.fixture
def token_width(request):
    """x64 as the width of tokens asks for it."""
    with jax.enable_x64(request.param == 64):
        yield request.param
