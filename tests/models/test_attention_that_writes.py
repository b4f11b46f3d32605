"""Layers whose attention writes the block's KV itself, beside layers that write it first."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.bench.shapes import SHAPES, random_target
from jaxspec.engine import parts
from jaxspec.models import Kernels, build_target
from jaxspec.models.layers import LayerParams, LayerSpec, attention
from tests.models.paging import block_at, page_tables
from tests.tiny_model import SIZES, write_tiny_model

CONFIG = dataclasses.replace(SHAPES["tiny"].target, qk_norm=True)
PAGE = 16
MERGED = Kernels(write_and_attend="triton_interpret")


@functools.cache
def forward_of(kernels: Kernels):
    target = build_target(
        CONFIG, feature_layers=(), page_size=PAGE, dtype=jnp.dtype("float32"), kernels=kernels
    )
    options = {"xla_backend_optimization_level": 0}
    return target, jax.jit(target.forward, compiler_options=options)


@pytest.mark.nightly
def test_steps_behind_each_other_leave_the_same_pages_and_hidden_states():
    params = random_target(CONFIG, "float32")
    table = page_tables(2, 3)
    ids = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (2, 40))
    # A prompt of 13 and 14 tokens is there; then verify steps of four of which two and four stay,
    # and plain ones. What is rejected is written over, and must not be seen.
    lens = [np.array(each) for each in ([0, 0], [13, 14], [15, 18], [16, 19])]
    blocks = [16, 4, 1, 4]
    results = []
    for kernels in (Kernels(), MERGED):
        target, forward = forward_of(kernels)
        kv, hidden = target.init_kv(7), []
        for start, size in zip(lens, blocks, strict=True):
            rows = [ids[b, s : s + size] for b, s in enumerate(start)]
            block = block_at(np.stack(rows), start.tolist(), table, PAGE)
            out = forward(params, kv, block.replace(rows_apart=size < 16))
            kv = out.kv
            hidden.append(np.asarray(out.hidden))
        results.append((hidden, [np.asarray(pages) for pages in kv]))
    (plain, plain_kv), (merged, merged_kv) = results
    for one, other in zip((*plain, *plain_kv), (*merged, *merged_kv), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def attend(x, mask, kernels, apart=True):
    spec = LayerSpec(num_heads=2, num_kv_heads=1, head_dim=16, rms_norm_eps=1e-6)
    rng = np.random.default_rng(1)
    layer = LayerParams(
        qkv=jnp.asarray(rng.standard_normal((64, 32)), jnp.float32),
        o=jnp.asarray(rng.standard_normal((32, 32)), jnp.float32),
        gate_up=None,
        down=None,
    )
    block = block_at(np.ones(x.shape[:2]), [20], page_tables(1, 3), PAGE)
    return attention(
        x,
        jnp.asarray(rng.standard_normal((4, 2, 1, PAGE, 16)), jnp.float32),
        block.replace(mask=mask, rows_apart=apart),
        layer,
        q_norm=None,
        k_norm=None,
        inv_freq=jnp.ones(8),
        spec=spec,
        kernels=kernels,
    )


def test_rows_of_a_tree_that_were_written_before_are_left_to_the_other_way():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 32)), jnp.float32)
    mask = jnp.full((1, 4, 1), 0b1111, jnp.uint32)  # of two rows more than the block has
    shapes = jax.eval_shape(functools.partial(attend, kernels=MERGED), x, mask)
    assert shapes == jax.eval_shape(functools.partial(attend, kernels=Kernels()), x, mask)


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_an_engine_gives_the_same_text_either_way(tmp_path, monkeypatch, drafter):
    folder = str(write_tiny_model(tmp_path / "model"))
    greedy = SamplingParams(temperature=0, max_tokens=24)
    choose, texts = parts.choose_kernels, []

    def choose_merged(*args):
        kernels, choices = choose(*args)
        return dataclasses.replace(kernels, write_and_attend="triton_interpret"), choices

    for choosing in (choose, choose_merged):
        monkeypatch.setattr(parts, "choose_kernels", choosing)
        llm = LLM(folder, drafter=drafter, **SIZES)
        done = llm.generate(["hello hello hello", "abcabcabc"], greedy)
        texts.append([request.outputs[0].token_ids for request in done])
    assert llm.assembled.geometry.kernels.write_and_attend == "triton_interpret"
    assert texts[0] == texts[1]
