from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import accept, dispatch
from kernels_pallas.dispatch import Choice, Device, UnsupportedKernel
from kernels_pallas.resolve_prepare import cases as resolve_prepare_cases

H200 = Device("gpu", "NVIDIA H200", (9, 0))
A100 = Device("gpu", "NVIDIA A100", (8, 0))
T4 = Device("gpu", "Tesla T4", (7, 5))
CPU = Device("cpu", "cpu", None)
ROCM = Device("gpu", "AMD MI300X", None)


@pytest.mark.parametrize(
    ("device", "choice"),
    [
        (H200, Choice("triton", "runs on NVIDIA H200")),
        (A100, Choice("triton", "runs on NVIDIA A100")),
        (T4, Choice("xla", "not triton, since compute capability 7.5 < 8.0")),
        (CPU, Choice("xla", "not triton, since platform cpu is not a GPU")),
        (
            ROCM,
            Choice("xla", "not triton, since AMD MI300X has no CUDA compute capability"),
        ),
    ],
)
def test_the_device_decides_and_the_reason_is_told(device, choice):
    assert dispatch.pick("resolve_prepare", device=device, block_size=16) == choice


def test_the_device_of_this_process_is_the_default():
    current = Device.current()
    assert current.platform == jax.devices()[0].platform
    assert dispatch.pick("accept") == dispatch.pick("accept", device=current)


@pytest.mark.parametrize(
    ("reported", "capability"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", None)]
)
def test_the_capability_is_read_from_the_device(monkeypatch, reported, capability):
    device = types.SimpleNamespace(platform="gpu", device_kind="x", compute_capability=reported)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert Device.current() == Device("gpu", "x", capability)


def test_mosaic_wants_hopper_and_a_jax_of_its_time(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert dispatch.refuses_mosaic_gpu(H200) == "jax 0.10.2 < 0.11"
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert dispatch.refuses_mosaic_gpu(H200) is None
    assert dispatch.refuses_mosaic_gpu(A100) == "compute capability 8.0 < 9.0"


def test_the_refusals_of_better_backends_are_told(monkeypatch):
    backends = {
        "mosaic_gpu": lambda device, shapes: f"block_size {shapes['block_size']} > 8",
        "triton": lambda device, shapes: None,
    }
    monkeypatch.setattr(accept, "BACKENDS", backends)
    choice = dispatch.pick("accept", device=H200, block_size=16)
    assert choice == Choice(
        "triton", "runs on NVIDIA H200; not mosaic_gpu, since block_size 16 > 8"
    )


def test_an_explicit_choice_is_taken():
    assert dispatch.pick("accept", requested="triton", device=H200).name == "triton"
    assert dispatch.pick("accept", requested="xla", device=H200).name == "xla"
    assert dispatch.pick("accept", requested="triton_interpret", device=CPU).name == (
        "triton_interpret"
    )


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            "triton",
            "accept: implementation 'triton' cannot run on Tesla T4, since compute capability "
            "7.5 < 8.0; take 'auto' or 'xla'",
        ),
        ("mosaic_gpu", "implementation='mosaic_gpu' is unknown; take one of auto, xla, triton,"),
        ("xla_interpret", "implementation='xla_interpret' is unknown"),
    ],
)
def test_an_explicit_choice_that_cannot_be_met_is_an_error(requested, message):
    with pytest.raises(UnsupportedKernel, match=message):
        dispatch.pick("accept", requested=requested, device=T4)


def test_an_unknown_op_is_an_error():
    with pytest.raises(UnsupportedKernel, match="op='acept' is no kernel op; take one of accept,"):
        dispatch.pick("acept", device=CPU)


def test_the_self_test_passes_a_right_kernel():
    case = resolve_prepare_cases.make_case("in use", 2, block_size=4)
    dispatch.self_test("resolve_prepare", "triton_interpret", case)


def test_the_self_test_names_op_case_and_error_of_a_wrong_kernel(monkeypatch):
    right = accept.triton.accept

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return result._replace(num_committed=result.num_committed + 1)

    monkeypatch.setattr(accept.triton, "accept", wrong)
    message = (
        "accept: implementation 'triton_interpret' differs from the reference on case 'one row' on "
        r".*: result\.num_committed: 1 of 1 differ, first at \[0\]: "
    )
    with pytest.raises(UnsupportedKernel, match=message):
        dispatch.self_test("accept", "triton_interpret")


def test_the_reference_needs_no_self_test(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr(accept.reference, "accept", fail)
    dispatch.self_test("accept", "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("op", dispatch.ops())
def test_the_self_test_of_every_op_passes_on_the_device(op):
    choice = dispatch.pick(op)
    if choice.name == "xla":
        pytest.skip(f"lacks a GPU for the kernel: {choice.reason}")
    dispatch.self_test(op, choice.name)
    with jax.enable_x64(True):
        dispatch.self_test(op, choice.name)
    assert jnp.asarray(0).dtype == jnp.int32
