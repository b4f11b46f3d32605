"""Faults that others shipped in reading checkpoints: F14, F24, F26."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.base import DrafterSetup
from jaxspec.drafters.dflash import plan_dflash
from jaxspec.models import Kernels, build_target
from jaxspec.models.layers import rope_inv_freq
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.hub import find_model
from jaxspec.weights.load import load_dflash, load_target
from tests.models.checkpoints import CONFIGS, load
from tests.models.paging import block_at, page_tables
from tests.weights.folders import (
    DFLASH_JSON,
    LLAMA_JSON,
    QWEN3_JSON,
    fixture_tensors,
    write_folder,
)

TARGET = dataclasses.replace(CONFIGS["qwen3"], num_layers=9)
NESTED = DFLASH_JSON["dflash_config"]


def plan(folder, block_size=None):
    config = EngineConfig(drafter=str(folder), block_size=block_size)
    return plan_dflash(DrafterSetup(config, TARGET, "float32", folder))


@pytest.fixture
def two_block_sizes(tmp_path):
    """Nested block size 8, top-level 16."""
    config = DFLASH_JSON | {"block_size": 16, "dflash_config": {**NESTED, "block_size": 8}}
    return write_folder(tmp_path, config, fixture_tensors(load("dflash")))


@pytest.mark.parametrize(("flag", "expected"), [(None, 8), (8, 8), (4, 4)])
def test_f14_the_block_size_counts_the_bonus_token(two_block_sizes, caplog, flag, expected):
    """F14: 8 positions are 7 drafts; the nested size wins over the top one, with a warning."""
    chosen = plan(two_block_sizes, flag)
    target = build_target(
        TARGET, feature_layers=(1, 4), page_size=4, dtype=jnp.float32, kernels=Kernels()
    )
    drafter = chosen.build(target, 4, Kernels())
    assert (chosen.block_size, drafter.block_size) == (expected, expected)
    assert drafter.num_draft_tokens == expected - 1
    assert "block_size is 8 in dflash_config and 16 at the top" in caplog.text


@pytest.mark.parametrize("flag", [16, 1, 0])
def test_f14_a_block_beyond_the_trained_one_is_refused(two_block_sizes, flag):
    """F14: a drafter trained at 8 cannot draft 15, and a block of one drafts nothing."""
    with pytest.raises(ConfigError, match=f"block.size.*{flag}"):
        plan(two_block_sizes, flag)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor is True: position 0"),
        ({"target_layer_ids": None}, "key 'target_layer_ids' is missing"),
        ({"target_layer_ids": [-1, 4]}, "target_layer_ids has -1, .* layers are 0 to 8"),
        ({"target_layer_ids": [1, 9]}, "target_layer_ids has 9, .* layers are 0 to 8"),
    ],
    ids=["position 0 predicts", "no taps", "negative tap", "tap past the end"],
)
def test_f24_a_layout_that_must_be_guessed_is_refused(tmp_path, change, message):
    """F24: such drafters load, and draft nothing that is accepted."""
    nested = {key: value for key, value in (NESTED | change).items() if value is not None}
    config = DFLASH_JSON | {"dflash_config": nested}
    write_folder(tmp_path, config, fixture_tensors(load("dflash")))
    with pytest.raises(ModelFileError, match=message):
        plan(tmp_path)


def test_f24_the_drafters_own_rotation_is_used(tmp_path):
    """F24: theta is 5000 in the drafter's config and 1,000,000 in the target's."""
    write_folder(tmp_path, DFLASH_JSON, fixture_tensors(load("dflash")))
    config, _ = load_dflash(tmp_path, TARGET, "float32")
    file = load("dflash")
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(inv_freq, 5000.0 ** -(np.arange(0, 8, 2) / 8), rtol=1e-6)
    assert TARGET.rope_theta == 1_000_000.0
    assert config.head_dim == file["w.layers.0.self_attn.q_norm.weight"].shape[0]


HEADS = {"tied without head": ("qwen3", QWEN3_JSON), "untied": ("llama", LLAMA_JSON)}


@pytest.mark.parametrize("case", HEADS)
def test_f26_logits_come_from_the_head_that_the_config_means(tmp_path, case):
    """F26: from the folder to the logits that transformers computed."""
    name, config = HEADS[case]
    file = load(name)
    write_folder(tmp_path, config, fixture_tensors(file))
    checkpoint = open_checkpoint(find_model(str(tmp_path), cache_dir=tmp_path))
    params = load_target(checkpoint, "float32")
    target = build_target(
        checkpoint.config, feature_layers=(), page_size=4, dtype=jnp.float32, kernels=Kernels()
    )
    block = block_at(file["token_ids"][None], [0], page_tables(1, 8), 4)
    output = jax.jit(target.forward)(params, target.init_kv(9), block)
    logits = np.asarray(target.logits(params, output.hidden))[0]
    np.testing.assert_allclose(logits, file["logits"], atol=5e-6 * np.abs(file["logits"]).max())


@pytest.mark.parametrize("extra", ["lm_head.weight", "d2t", "unheard_of.weight"])
def test_f26_a_drafters_own_head_is_never_dropped(tmp_path, extra):
    """F26: a reduced head and its id map, or any unknown tensor, is an error and no warning."""
    tensors = fixture_tensors(load("dflash")) | {extra: np.zeros((16, 32), np.float32)}
    write_folder(tmp_path, DFLASH_JSON, tensors)
    with pytest.raises(ModelFileError, match=extra):
        plan(tmp_path)


def test_f26_a_drafter_without_head_has_all_it_needs(tmp_path):
    """F26: embedding and head are the target's."""
    write_folder(tmp_path, DFLASH_JSON, fixture_tensors(load("dflash")))
    assert plan(tmp_path).feature_layers == (1, 4)
