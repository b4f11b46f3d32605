"""Pictures of figures show these figures."""

import pytest

from jaxspec.pictures.bars import (
    accept_length_picture,
    floor_picture,
    kernel_picture,
    speed_picture,
)
from jaxspec.pictures.kernel_checks import check_kernels, runnable
from kernels_pallas import dispatch
from kernels_pallas.overview import overview


def heights(axes):
    return [round(bar.get_height(), 6) for bar in axes.patches]


def widths(axes):
    return [round(bar.get_width(), 6) for bar in axes.patches]


def texts(axes):
    legend = axes.get_legend()
    labels = [text.get_text() for text in legend.get_texts()] if legend else []
    return labels + [text.get_text() for text in axes.texts]


def test_accept_lengths_are_shares_with_their_mean():
    (axes,) = accept_length_picture({"a": {1: 3, 3: 1}, "b": {2: 5}}).figure.axes
    assert heights(axes) == [75, 0, 25, 0, 100, 0]
    assert texts(axes) == ["a, mean 1.50", "b, mean 2.00"]


def test_speeds_are_held_against_the_first():
    (axes,) = speed_picture({"plain": 784.0, "dflash": 1695.0}, "H200").figure.axes
    assert widths(axes) == [784, 1695]
    assert texts(axes) == [" 784  (1.00x)", " 1,695  (2.16x)"]


def test_steps_stand_beside_their_floor():
    rows = [
        {"step": step, "batch": batch, "ms": 2.0 * batch, "floor_ms": 1.0}
        for step in ("plain", "dflash")
        for batch in (1, 2)
    ]
    plain, dflash = floor_picture(rows, "of a shape").figure.axes
    assert plain.get_title(loc="left") == "plain of a shape"
    assert heights(dflash) == [2, 4, 1, 1]
    assert texts(dflash)[-2:] == ["2.00x", "4.00x"]


@pytest.mark.parametrize(
    ("extra", "expected", "label"),
    [
        ({}, [4.0, 1.0, 2.0], "us"),
        ({"share_of_copy_bandwidth": 0.5}, [50.0] * 3, "% of the copy bandwidth"),
    ],
)
def test_kernels_stand_beside_xla(extra, expected, label):
    rows = [
        {"case": "short", "implementation": "xla", "us": 4.0, **extra},
        {"case": "short", "implementation": "triton", "us": 1.0, **extra},
        {"case": "long", "implementation": "triton", "us": 2.0, **extra},
    ]
    (axes,) = kernel_picture(rows).figure.axes
    assert widths(axes) == expected
    assert axes.get_xlabel() == label
    assert texts(axes) == ["xla", "triton"]


def test_a_kernel_is_interpreted_where_no_gpu_runs_it(monkeypatch):
    monkeypatch.setattr(dispatch.Device, "current", lambda: dispatch.Device("cpu", "cpu"))
    assert runnable("accept") == "triton_interpret"
    gpu = dispatch.Device("gpu", "NVIDIA H200", (9, 0))
    monkeypatch.setattr(dispatch.Device, "current", lambda: gpu)
    assert runnable("accept") == "triton"


def test_kernels_are_held_against_their_references(monkeypatch):
    (row,) = check_kernels(["dflash_prepare_block"], num_cases=1)
    assert row["op"] == "dflash_prepare_block"
    assert row["equal to the reference"] == 1
    with monkeypatch.context() as patch:
        patch.setattr("kernels_pallas.testing.compare", lambda *args: "by a lot")
        with pytest.raises(dispatch.UnsupportedKernel, match=r"case .* by a lot"):
            check_kernels(["dflash_prepare_block"], num_cases=1)


def test_the_overview_names_the_device_and_every_op(monkeypatch):
    gpu = dispatch.Device("gpu", "Tesla T4", (7, 5))
    monkeypatch.setattr(dispatch.Device, "current", lambda: gpu)
    first, _, header, *lines = overview().splitlines()
    assert first.startswith("Tesla T4, compute capability 7.5, jax ")
    assert header.split() == ["op", "name", "reason"]
    assert [line.split()[0] for line in lines] == list(dispatch.ops())
    assert "not triton, since compute capability 7.5 < 8.0" in lines[0]
