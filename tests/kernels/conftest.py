"""Every kernel test is written once, against an implementation of the op."""

from __future__ import annotations

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
