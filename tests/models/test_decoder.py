"""Llama and Qwen3 against transformers, and a block against its tokens one by one."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.future_map import token_dtype
from jaxspec.models import Kernels, Target, build_target
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, TargetParams
from tests.models.checkpoints import CONFIGS, load, target_params
from tests.models.paging import block_at, page_tables, rows_of

PAGE_SIZE = 4
# Products of 48 terms rounded in another order, through three layers: relative to the largest.
ROUNDING = 5e-6


def build(config: ModelConfig, feature_layers=(), dtype=jnp.float32) -> Target:
    return build_target(
        config,
        feature_layers=feature_layers,
        page_size=PAGE_SIZE,
        dtype=dtype,
        kernels=Kernels(),
    )


def relative_error(actual, expected) -> float:
    return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


def whole_pass(name: str, token_ids: np.ndarray, table: np.ndarray):
    """(target, params, output) for one prompt in one block; pages 1..16 exist."""
    target = build(CONFIGS[name], feature_layers=(0, 1))
    params = target_params(load(name), CONFIGS[name])
    block = block_at(token_ids[None], [0], table, PAGE_SIZE)
    return target, params, jax.jit(target.forward)(params, target.init_kv(17), block)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_and_layer_outputs_equal_transformers(name):
    file = load(name)
    target, params, out = whole_pass(name, file["token_ids"], page_tables(1, 8))
    logits = target.logits(params, out.hidden)

    chex.assert_type(logits, jnp.float32)
    assert relative_error(logits[0], file["logits"]) < ROUNDING
    expected = np.concatenate(list(file["layer_outputs"]), axis=-1)
    assert relative_error(out.features[0], expected) < ROUNDING


@pytest.mark.parametrize(
    ("name", "tile"), [("llama", 1), ("qwen3", 5)], ids=["one by one", "five at a time"]
)
def test_tokens_in_pieces_equal_one_whole_pass(name, tile):
    ids, table = load(name)["token_ids"], page_tables(1, 8)
    target, params, whole = whole_pass(name, ids, table)
    forward = jax.jit(target.forward)

    kv, hidden, features = target.init_kv(17), [], []
    for start in range(0, 30, tile):
        block = block_at(ids[None, start : start + tile], [start], table, PAGE_SIZE)
        out = forward(params, kv, block)
        kv = out.kv
        hidden.append(np.asarray(out.hidden))
        features.append(np.asarray(out.features))

    assert relative_error(np.concatenate(hidden, axis=1), np.asarray(whole.hidden)) < ROUNDING
    assert relative_error(np.concatenate(features, axis=1), np.asarray(whole.features)) < ROUNDING
    for pages, expected in zip(kv, whole.kv, strict=True):
        rows = rows_of(expected, table[0], 30)
        assert relative_error(rows_of(pages, table[0], 30), rows) < ROUNDING


def test_tiles_of_two_prompts_in_one_call_equal_each_prompt_alone():
    """Rows 0..2 are 21 tokens of one prompt, rows 3 and 4 are 14 of another."""
    tables, ids = page_tables(2, 8), load("llama")["token_ids"]
    first, second = ids, ids[::-1]
    target, params, first_alone = whole_pass("llama", first, tables[:1])
    _, _, second_alone = whole_pass("llama", second, tables[1:])
    tiles = np.concatenate([first[:21].reshape(3, 7), second[:14].reshape(2, 7)])
    block = block_at(tiles, [0, 7, 14, 0, 7], tables[[0, 0, 0, 1, 1]], PAGE_SIZE)

    packed = np.asarray(jax.jit(target.forward)(params, target.init_kv(17), block).hidden)

    first_rows = np.asarray(first_alone.hidden)[:, :21].reshape(3, 7, -1)
    second_rows = np.asarray(second_alone.hidden)[:, :14].reshape(2, 7, -1)
    assert relative_error(packed, np.concatenate([first_rows, second_rows])) < ROUNDING


def test_features_are_layer_outputs_in_the_order_asked_for():
    """F13: layer i adds 10^i and nothing else; the last layer's tap is before the final norm, and
    the number of layers means after it (rows of equal numbers are normed to ones, times 7)."""
    width, layers = 8, 4
    config = ModelConfig("llama", 11, width, 4, layers, 2, 1, 4, 1e4, 1e-5, 64, True)
    zeros = jnp.zeros
    params = TargetParams(
        embed=zeros((11, width)),
        lm_head=None,
        final_norm=jnp.full((width,), 7.0),
        input_norms=jnp.ones((layers, width)),
        post_norms=jnp.ones((layers, width)),
        q_norms=None,
        k_norms=None,
        layers=tuple(
            LayerParams(
                qkv=zeros((16, width)),
                o=zeros((width, 8)),
                gate_up=zeros((8, width)),
                down=zeros((width, 4)),
                o_bias=jnp.full((width,), 10.0**i),
            )
            for i in range(layers)
        ),
    )
    target = build(config, feature_layers=(3, 0, 4, 1))
    block = block_at([[1, 2, 3]], [0], page_tables(1, 1), PAGE_SIZE)

    out = jax.jit(target.forward)(params, target.init_kv(2), block)

    row = np.repeat([1111.0, 1.0, 7.0, 11.0], width)
    np.testing.assert_allclose(out.features, np.tile(row, (1, 3, 1)), rtol=1e-6)
    np.testing.assert_array_equal(out.features[..., 2 * width : 3 * width], out.hidden)


def test_without_feature_layers_features_have_no_width():
    config = CONFIGS["llama"]
    target = build(config)
    block = block_at([[1, 2, 3]], [0], page_tables(1, 1), PAGE_SIZE)
    params = target_params(load("llama"), config)
    out = jax.eval_shape(target.forward, params, target.init_kv(2), block)
    chex.assert_shape(out.features, (1, 3, 0))


def test_padding_rows_touch_nothing():
    """A padding row has length 0 and page table 0: only page 0 may change beside the live row's."""
    file, config = load("llama"), CONFIGS["llama"]
    target, params = build(config), target_params(file, config)
    table = np.array([[2, 3], [0, 0]], np.int32)
    marked = tuple(pages + 5.0 for pages in target.init_kv(5))
    block = block_at([[1, 2, 3, 4, 5], [0] * 5], [1, 0], table, PAGE_SIZE)

    kv = jax.jit(target.forward)(params, marked, block).kv

    for pages in kv:
        np.testing.assert_array_equal(pages[jnp.array([1, 4])], 5.0)
        np.testing.assert_array_equal(pages[2, :, :, 0], 5.0)
        np.testing.assert_array_equal(pages[3, :, :, 2:], 5.0)


def test_a_bfloat16_model_keeps_its_dtype_and_makes_float32_logits():
    file, config = load("qwen3"), CONFIGS["qwen3"]
    target = build(config, feature_layers=(1,), dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_params(file, config))
    block = block_at(file["token_ids"][None], [0], page_tables(1, 8), PAGE_SIZE)

    out = jax.jit(target.forward)(params, target.init_kv(9), block)
    logits = target.logits(params, out.hidden)

    chex.assert_type([out.hidden, out.features, *out.kv], jnp.bfloat16)
    chex.assert_type(logits, jnp.float32)
    assert relative_error(logits[0], file["logits"]) < 0.05


def test_no_type_widens_under_x64(x64):
    config = CONFIGS["qwen3"]
    target = build(config, feature_layers=(0, 2), dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_params(load("qwen3"), config))
    block = block_at([[1, 2, 3]], [0], page_tables(1, 1), PAGE_SIZE)
    block = block.replace(token_ids=block.token_ids.astype(token_dtype()))

    out = jax.eval_shape(target.forward, params, target.init_kv(2), block)
    logits = jax.eval_shape(target.logits, params, out.hidden)

    chex.assert_type([out.hidden, out.features, *out.kv], jnp.bfloat16)
    chex.assert_type(logits, jnp.float32)


def test_an_unknown_architecture_is_refused():
    config = dataclasses.replace(CONFIGS["llama"], architecture="mamba")
    with pytest.raises(ValueError, match="'mamba' is not supported: the models are llama, qwen3"):
        build(config)


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_feature_layer_the_model_lacks_is_refused(layer):
    with pytest.raises(ValueError, match=f"feature layer {layer} does not exist.*layers 0 to 2"):
        build(CONFIGS["llama"], feature_layers=(0, layer))


@pytest.mark.parametrize(("name", "hint"), [("llama", "use qwen3"), ("qwen3", "use llama")])
def test_norms_that_do_not_belong_to_the_architecture_are_refused(name, hint):
    config = dataclasses.replace(CONFIGS[name], qk_norm=not CONFIGS[name].qk_norm)
    with pytest.raises(ValueError, match=hint):
        build(config)
