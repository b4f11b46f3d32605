"""Writes small checkpoints for the tests: safetensors folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

LLAMA_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_JSON = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}
DFLASH_JSON = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_target_layers": 9,
    "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 5, "block_size": 6},
}
GGUF_META = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 40,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
}


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    num_shards: int = 1,
    **json_files: Any,
) -> Path:
    """Writes config.json, the tensors in so many shards, and other JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"config": config, **json_files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    names = sorted(tensors)
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        members = names[shard::num_shards]
        save_file({name: tensors[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fixture_tensors(file: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The checkpoint inside a fixture of `tests/make_fixtures.py`."""
    return {key[2:]: value for key, value in file.items() if key.startswith("w.")}


def llama_gguf_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the model that `GGUF_META` describes, under GGUF's names."""
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd": (40, 64),
        "output_norm": (64,),
        "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    return {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    meta: Mapping[str, Any] = GGUF_META,
    num_tokens: int = 40,
) -> Path:
    """Writes a GGUF file; matrices in the quantisation, vectors in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([f"t{index}" for index in range(num_tokens)])
    for key, value in meta.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        kind = gguf.GGMLQuantizationType[quantization if value.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
