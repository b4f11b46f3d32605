"""Layers whose products take care of the norms between them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.shapes import SHAPES, random_target
from jaxspec.config import Kernels
from jaxspec.models import build_target
from jaxspec.models.base import Block
from jaxspec.models.layers import defers_norms
from kernels_pallas.few_row_gemm import MAX_ROWS

XLA = Kernels()
INTERPRETED = Kernels(few_row_gemm="triton_interpret", add_rms_norm="triton_interpret")
TOKENS = 3


def deferring(kernels: Kernels) -> Kernels:
    return dataclasses.replace(kernels, deferred_norms=True)


def forward(kernels: Kernels, dtype: str = "bfloat16") -> list[np.ndarray]:
    """Hidden states, the streams behind both layers and KV of the tiny model, norms not all one."""
    config = SHAPES["tiny"].target
    target = build_target(
        config, feature_layers=(0, 1), page_size=16, dtype=jnp.dtype(dtype), kernels=kernels
    )
    params = random_target(config, "bfloat16")
    rng = np.random.default_rng(5)

    def uneven(norm: jax.Array) -> jax.Array:
        return jnp.asarray(rng.uniform(0.25, 4.0, norm.shape), norm.dtype)

    params = params.replace(
        input_norms=uneven(params.input_norms),
        post_norms=uneven(params.post_norms),
        final_norm=uneven(params.final_norm),
    )
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    block = Block(
        token_ids=positions + 5,
        positions=positions,
        kv_locs=positions + 16,
        page_table=jnp.ones((1, 2), jnp.int32),
        lens=jnp.zeros((1,), jnp.int32),
    )
    options = {"xla_backend_optimization_level": 0}
    run = jax.jit(target.forward, compiler_options=options)
    out = run(params, target.init_kv(3), block)
    return [np.asarray(x, np.float32) for x in (out.hidden, out.features, *out.kv)]


@pytest.mark.parametrize("kernels", [XLA, pytest.param(INTERPRETED, marks=pytest.mark.nightly)])
def test_no_result_is_farther_from_float32_than_with_norms_of_their_own(kernels):
    exact = forward(XLA, "float32")
    apart, deferred = forward(kernels), forward(deferring(kernels))
    for a, d, e in zip(apart, deferred, exact, strict=True):
        limit = np.sqrt(np.mean((a - e) ** 2))
        assert limit > 0
        assert np.sqrt(np.mean((d - e) ** 2)) < 1.25 * limit


@pytest.mark.parametrize(
    ("rows", "dtype", "has_bias", "expected"),
    [
        (MAX_ROWS, "bfloat16", False, True),
        (MAX_ROWS + 1, "bfloat16", False, False),
        (1, "float16", False, False),
        (1, "bfloat16", True, False),
    ],
)
def test_few_rows_of_bfloat16_without_a_bias_behind_attention_defer(
    rows, dtype, has_bias, expected
):
    config = SHAPES["tiny"].target
    params = jax.eval_shape(lambda: random_target(config, dtype))
    layer = params.layers[1]
    if has_bias:
        bias = jax.ShapeDtypeStruct((config.hidden_size,), jnp.dtype(dtype))
        params = params.replace(layers=(params.layers[0], layer.replace(o_bias=bias)))
    x = jax.ShapeDtypeStruct((1, rows, config.hidden_size), jnp.dtype(dtype))
    assert defers_norms(x, params, deferring(XLA)) is expected
    assert not defers_norms(x, params, XLA)
