"""Kernels that let the one behind be launched early: where they may, and that only those do."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.shapes import SHAPES, random_target
from jaxspec.config import Kernels
from jaxspec.models import build_target
from jaxspec.models.base import Block
from kernels_pallas import dispatch, early_launch, testing
from kernels_pallas.dispatch import Device

TRIGGER = "griddepcontrol.launch_dependents"
EARLY = Kernels(**{op: "triton" for op in early_launch.CHAIN}, early_launch=True)


def lowered(op, **static):
    case = dispatch.cases_module(op).CASES[0]
    args, own = dispatch.cases_module(op).make_inputs(case)
    run = functools.partial(dispatch.function(op), **own, **static, implementation="triton")
    return testing.lower_for_cuda(run, *args)


@pytest.mark.parametrize("op", early_launch.CHAIN)
def test_each_kernel_of_a_layer_can_and_need_not(op):
    assert TRIGGER in lowered(op, early_launch=True)
    assert TRIGGER not in lowered(op)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu", "cpu"), "platform cpu is not a GPU"),
        (Device("gpu", "NVIDIA A100", (8, 0)), "compute capability 8.0 < 9.0"),
        (Device("gpu", "NVIDIA H200", (9, 0)), None),
    ],
)
def test_it_needs_hopper(device, reason):
    assert early_launch.refuses(device) == reason


def forward_of(feature_layers, *, kernels=EARLY, dtype="bfloat16", tokens=3):
    """The tiny model's forward over one block, and its arguments."""
    config = SHAPES["tiny"].target
    target = build_target(
        config,
        feature_layers=feature_layers,
        page_size=16,
        dtype=jnp.dtype(dtype),
        kernels=kernels,
    )
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    block = Block(
        token_ids=positions + 5,
        positions=positions,
        kv_locs=positions + 16,
        page_table=jnp.ones((1, 2), jnp.int32),
        lens=jnp.zeros((1,), jnp.int32),
    )
    params = random_target(config, dtype)
    return target.forward, (params, target.init_kv(3), block)


def num_triggers(feature_layers, **changes) -> int:
    forward, args = forward_of(feature_layers, **changes)
    return testing.lower_for_cuda(forward, *args).count(TRIGGER)


@pytest.mark.nightly
def test_a_layer_whose_output_is_read_elsewhere_ends_late():
    first, second = 7, 8  # kernels that a layer launches early; the first has no sum to norm
    assert num_triggers(()) == first + second
    # What layer 0 leaves is summed and normed at the start of layer 1, and read by the drafter.
    assert num_triggers((0,)) == first + second - 1
    # The last layer's is summed before the final norm, which is never early.
    assert num_triggers((1,)) == first + second


@pytest.mark.nightly
def test_nothing_is_early_where_xla_multiplies_or_mosaic_may():
    assert num_triggers((), tokens=80) == 0
    mosaic = dataclasses.replace(EARLY, few_row_gemm="mosaic_gpu")
    assert num_triggers((), kernels=mosaic, tokens=128) == 0
    assert num_triggers((), kernels=mosaic) == num_triggers(())
    late = dataclasses.replace(EARLY, early_launch=False)
    assert num_triggers((), kernels=late) == 0


@pytest.mark.gpu
def test_early_kernels_compute_what_late_ones_do():
    refusal = early_launch.refuses(Device.current())
    if refusal is not None:
        pytest.skip(f"lacks a GPU that launches early: {refusal}")
    results = []
    for kernels in (EARLY, dataclasses.replace(EARLY, early_launch=False)):
        forward, args = forward_of((0, 1), kernels=kernels)
        out = jax.jit(forward)(*args)
        results.append([np.asarray(x, np.float32) for x in (out.hidden, out.features, *out.kv)])
    for early, late in zip(*results, strict=True):
        np.testing.assert_array_equal(early, late)
