"""GGUF metadata: what it becomes, and what is refused by name."""

import numpy as np
import pytest

from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.models.layers import rope_inv_freq
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.gguf import open_gguf
from jaxspec.weights.gguf_config import gguf_model_config, gguf_names
from tests.weights.folders import GGUF_META, llama_gguf_tensors, write_gguf


def config_of(tmp_path, *, tensors=None, architecture="llama", **meta) -> ModelConfig:
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors or {"token_embd.weight": np.zeros((40, 64), np.float32)},
        architecture=architecture,
        meta={**GGUF_META, **meta},
    )
    return gguf_model_config(open_gguf(path))


def test_llama_metadata_becomes_a_config(tmp_path):
    assert config_of(tmp_path, **{"tokenizer.ggml.eot_token_id": 7}) == ModelConfig(
        architecture="llama",
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_ids=(2, 7),
        bos_token_id=1,
    )


def test_stored_heads_biases_and_norms_decide_what_the_model_has(tmp_path):
    tensors = llama_gguf_tensors() | {
        "output.weight": np.zeros((40, 64), np.float32),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "blk.0.attn_q_norm.weight": np.zeros(16, np.float32),
    }
    config = config_of(tmp_path, tensors=tensors)
    assert (config.tie_word_embeddings, config.attention_bias, config.qk_norm) == (
        False,
        True,
        True,
    )


def test_only_llama_rows_are_interleaved(tmp_path):
    llama = write_gguf(tmp_path / "l.gguf", {}, architecture="llama")
    qwen3 = write_gguf(tmp_path / "q.gguf", {}, architecture="qwen3")
    assert gguf_names(open_gguf(llama)).interleaved_rotary
    assert not gguf_names(open_gguf(qwen3)).interleaved_rotary


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path):
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    divisors = rope_inv_freq(64, 500000.0) / rope_inv_freq(64, 500000.0, scaling)
    sizes = {
        "llama.embedding_length": 128,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.freq_base": 500000.0,
    }
    config = config_of(tmp_path, tensors={"rope_freqs.weight": divisors}, **sizes)
    assert config.head_dim == 64
    assert config.rope_scaling.factor == pytest.approx(32.0, rel=1e-5)
    np.testing.assert_allclose(
        rope_inv_freq(64, 500000.0, config.rope_scaling),
        rope_inv_freq(64, 500000.0, scaling),
        rtol=1e-5,
    )
    with pytest.raises(ModelFileError, match="is not Llama 3's rope scaling"):
        config_of(tmp_path, tensors={"rope_freqs.weight": np.flip(divisors).copy()}, **sizes)
    ones = {"rope_freqs.weight": np.ones_like(divisors)}
    assert config_of(tmp_path, tensors=ones, **sizes).rope_scaling is None


REFUSED = {
    "another architecture": ("gemma", {}, "GGUF architecture 'gemma' is not supported"),
    "experts": ("llama", {"llama.expert_count": 8}, "is a mixture of 8 experts"),
    "scaling": ("llama", {"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not"),
    "partial rotation": ("llama", {"llama.rope.dimension_count": 8}, "only 8 of 16 head"),
    "missing": ("qwen3", {}, "metadata 'qwen3.embedding_length' is missing"),
    "text for a number": ("llama", {"llama.block_count": "three"}, "invalid literal.*corrupt"),
    "no heads": ("llama", {"llama.attention.head_count": 0}, "num_heads is 0, below 1"),
    "grouping": (
        "llama",
        {"llama.attention.head_count_kv": 3},
        "4 query heads do not divide into 3 KV heads",
    ),
    "odd head": (
        "llama",
        {"llama.attention.key_length": 15},
        "head_dim is 15, rotary embedding needs it even",
    ),
    "stop id": (
        "llama",
        {"tokenizer.ggml.eos_token_id": 40},
        "stop id 40 is outside the vocabulary of 40",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_unsupported_metadata_is_refused_by_name(tmp_path, fault):
    architecture, meta, message = REFUSED[fault]
    with pytest.raises(ModelFileError, match=message):
        config_of(tmp_path, architecture=architecture, **meta)
