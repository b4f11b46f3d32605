"""Checkpoints become the parameters that the models' own tests build by hand (F26)."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.hub import find_model
from jaxspec.weights.load import load_dflash, load_target, rotate_half_order
from tests.models.checkpoints import CONFIGS, DFLASH, dflash_params, load, target_params
from tests.weights.folders import (
    DFLASH_JSON,
    LLAMA_JSON,
    QWEN3_JSON,
    fixture_tensors,
    llama_gguf_tensors,
    write_folder,
    write_gguf,
)

JSON = {"llama": LLAMA_JSON, "qwen3": QWEN3_JSON}


def load_folder(folder, dtype="float32", **options):
    return load_target(open_checkpoint(find_model(str(folder), cache_dir=folder)), dtype, **options)


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_folder_loads_as_its_tensors_fused_by_hand(tmp_path, name, num_shards):
    file = load(name)
    write_folder(tmp_path, JSON[name], fixture_tensors(file), num_shards=num_shards)
    assert_equal(load_folder(tmp_path), target_params(file, CONFIGS[name]))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_array_has_the_wanted_dtype(tmp_path, stored, dtype):
    tensors = {k: v.astype(stored) for k, v in fixture_tensors(load("qwen3")).items()}
    write_folder(tmp_path, QWEN3_JSON, tensors)
    params = load_folder(tmp_path, dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    embed = tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params.embed, embed.astype(jnp.dtype(dtype)))


def test_an_unknown_dtype_names_those_there_are(tmp_path):
    write_folder(tmp_path, QWEN3_JSON, fixture_tensors(load("qwen3")))
    with pytest.raises(ValueError, match="dtype 'float8' is not one of float32, bfloat16, float16"):
        load_folder(tmp_path, "float8")


def test_progress_counts_the_parameters(tmp_path):
    tensors = fixture_tensors(load("llama"))
    write_folder(tmp_path, LLAMA_JSON, tensors)
    calls = []
    load_folder(tmp_path, progress=lambda *call: calls.append(call))
    total = sum(value.size for value in tensors.values())
    assert calls[0] == ("loading weights", 0, total)
    assert calls[-1] == ("loading weights", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_loaded_arrays_do_not_share_memory_with_anything_writable(tmp_path):
    """F11: jax may take over a numpy buffer, so what it was given must never change."""
    write_folder(tmp_path, QWEN3_JSON, fixture_tensors(load("qwen3")))
    given = []

    def put(buffer):
        given.append(buffer)
        return jax.device_put(buffer)

    load_folder(tmp_path, put=put)
    assert not any(buffer.flags.writeable for buffer in given)
    addresses = [(b.ctypes.data, b.ctypes.data + b.nbytes) for b in given]
    assert all(
        stop <= start
        for (_, stop), (start, _) in zip(sorted(addresses), sorted(addresses)[1:], strict=False)
    )


def test_missing_left_over_and_misshapen_tensors_are_all_named(tmp_path):
    tensors = fixture_tensors(load("qwen3"))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    write_folder(tmp_path, QWEN3_JSON, tensors)
    with pytest.raises(ModelFileError) as error:
        load_folder(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: the tensors are not those that the config asks for, "
        "missing: model.layers.1.mlp.up_proj.weight; "
        "not expected: model.layers.0.self_attn.q_proj.bias; "
        "of another shape: model.norm.weight (31,) instead of (32,); "
        "check that config and weights belong together and are complete."
    )


def test_a_long_list_of_names_is_cut_short(tmp_path):
    write_folder(tmp_path, {**QWEN3_JSON, "num_hidden_layers": 4}, fixture_tensors(load("qwen3")))
    with pytest.raises(ModelFileError, match=r"model.layers.3.* and 3 more; check"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.2.self_attn.rotary_emb.cos_cached",
    ],
)
def test_derived_buffers_of_old_checkpoints_are_left_out(tmp_path, name):
    file = load("llama")
    tensors = fixture_tensors(file) | {name: np.zeros(4, np.float32)}
    write_folder(tmp_path, LLAMA_JSON, tensors)
    assert_equal(load_folder(tmp_path), target_params(file, CONFIGS["llama"]))


def test_a_tied_model_without_head_uses_its_embedding(tmp_path):
    write_folder(tmp_path, QWEN3_JSON, fixture_tensors(load("qwen3")))
    params = load_folder(tmp_path)
    assert params.lm_head is None
    assert params.head is params.embed


def test_a_tied_model_may_repeat_its_embedding_as_head(tmp_path, caplog):
    tensors = fixture_tensors(load("qwen3"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_folder(tmp_path, QWEN3_JSON, tensors)
    with caplog.at_level(logging.INFO):
        assert load_folder(tmp_path).lm_head is None
    assert "lm_head.weight repeats model.embed_tokens.weight and is not loaded" in caplog.text


@pytest.mark.parametrize("rows", [97, 16])
def test_a_tied_model_with_another_head_is_refused(tmp_path, rows):
    tensors = fixture_tensors(load("qwen3"))
    tensors["lm_head.weight"] = np.ones((rows, 32), np.float32)
    write_folder(tmp_path, QWEN3_JSON, tensors)
    message = "tie_word_embeddings is true, yet lm_head.weight differs from model.embed_tokens"
    with pytest.raises(ModelFileError, match=message):
        load_folder(tmp_path)


def test_an_untied_model_without_head_is_refused(tmp_path):
    write_folder(
        tmp_path, {**QWEN3_JSON, "tie_word_embeddings": False}, fixture_tensors(load("qwen3"))
    )
    with pytest.raises(ModelFileError, match=r"missing: lm_head\.weight; check"):
        load_folder(tmp_path)


def interleaved(rows, num_heads):
    """llama.cpp's reordering, row by row: half-rotation row i of a head becomes row 2i."""
    size = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def test_rows_of_a_head_return_to_half_rotation_order():
    rows = np.arange(8).reshape(8, 1)
    np.testing.assert_array_equal(rotate_half_order(rows, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])
    np.testing.assert_array_equal(rotate_half_order(interleaved(rows, 1), 1), rows)


@pytest.mark.parametrize("quantization", ["F32", "F16"])
def test_a_gguf_loads_with_q_and_k_in_order(tmp_path, quantization):
    tensors = {k: np.round(v, 1) for k, v in llama_gguf_tensors().items()}
    q, k = (tensors[f"blk.0.attn_{x}.weight"] for x in "qk")
    stored = tensors | {
        "blk.0.attn_q.weight": interleaved(q, 4),
        "blk.0.attn_k.weight": interleaved(k, 2),
    }
    path = write_gguf(tmp_path / "m.gguf", stored, quantization=quantization)
    params = load_folder(path)
    as_stored = np.float16 if quantization == "F16" else np.float32
    expected = np.concatenate([q, k, tensors["blk.0.attn_v.weight"]]).astype(as_stored)
    np.testing.assert_array_equal(params.layers[0].qkv, expected.astype(np.float32))
    np.testing.assert_array_equal(params.post_norms, tensors["blk.0.ffn_norm.weight"][None])


def target_for_dflash():
    return dataclasses.replace(CONFIGS["qwen3"], num_layers=9)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_dflash_drafter_loads_as_its_tensors_fused_by_hand(tmp_path, prefix):
    file = load("dflash")
    tensors = {prefix + name: value for name, value in fixture_tensors(file).items()}
    write_folder(tmp_path, DFLASH_JSON, tensors)
    config, params = load_dflash(tmp_path, target_for_dflash(), "float32")
    assert config == DFLASH
    assert_equal(params, dflash_params(file))


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("lm_head.weight", 16, r"has lm_head.weight \(16, 32\), an output head, while DFlash"),
        ("embed_tokens.weight", 97, r"has embed_tokens.weight \(97, 32\), an embedding"),
        ("d2t", 16, "has d2t .* a map from its vocabulary to the target's"),
        ("t2d", 97, "has t2d .* a map from the target's vocabulary to its own"),
    ],
)
def test_a_drafter_with_a_vocabulary_of_its_own_is_refused(tmp_path, name, rows, message):
    tensors = fixture_tensors(load("dflash")) | {name: np.zeros((rows, 32), np.float32)}
    write_folder(tmp_path, DFLASH_JSON, tensors)
    with pytest.raises(ModelFileError, match=message):
        load_dflash(tmp_path, target_for_dflash(), "float32")


def test_a_drafter_with_other_tensors_is_refused(tmp_path):
    tensors = fixture_tensors(load("dflash"))
    tensors["markov_head.markov_w1.weight"] = tensors.pop("hidden_norm.weight")
    write_folder(tmp_path, DFLASH_JSON, tensors)
    message = "missing: hidden_norm.weight; not expected: markov_head.markov_w1.weight"
    with pytest.raises(ModelFileError, match=message):
        load_dflash(tmp_path, target_for_dflash(), "float32")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gguf_of_the_same_model_loads_the_same(tmp_path, name):
    """The converter's names, and its order of q and k rows for Llama, from the PyTorch tensors."""
    file = load(name)
    config = CONFIGS[name]
    stored = {}
    for key, value in fixture_tensors(file).items():
        stem, _, kind = key.rpartition(".")
        for theirs, ours in GGUF_SPELLING.items():
            stem = stem.replace(theirs, ours)
        if name == "llama" and stem.endswith(("attn_q", "attn_k")):
            heads = config.num_heads if stem.endswith("q") else config.num_kv_heads
            value = interleaved(value, heads)
        stored[f"{stem}.{kind}"] = value
    sizes = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    path = write_gguf(
        tmp_path / "m.gguf",
        stored,
        architecture=name,
        meta={f"{name}.{key}": value for key, value in sizes.items()},
        num_tokens=config.vocab_size,
    )
    checkpoint = open_checkpoint(find_model(str(path), cache_dir=tmp_path))
    # Llama's scaling is stored as divisors, tested with the metadata.
    assert checkpoint.config == dataclasses.replace(config, rope_scaling=None)
    assert_equal(load_target(checkpoint, "float32"), target_params(file, config))


GGUF_SPELLING = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    write_folder(tmp_path, QWEN3_JSON, fixture_tensors(load("qwen3")))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelFileError, match=r"model.safetensors: cannot be read \(Is a directory"):
        load_folder(tmp_path)
