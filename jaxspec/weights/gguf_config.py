"""Turns a GGUF file's metadata into a `ModelConfig`. Host only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.weights.config_json import check_model
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.gguf import GgufFile
from jaxspec.weights.json_fields import merge_token_ids
from jaxspec.weights.mapping import GGUF_NAMES, TensorNames

# llama.cpp's converter reorders q and k rows for pairwise rotation in this architecture only.
INTERLEAVED = {"llama": True, "qwen3": False}


def gguf_names(file: GgufFile) -> TensorNames:
    """How the file spells its tensors."""
    architecture = file.metadata["general.architecture"]
    return replace(GGUF_NAMES, interleaved_rotary=INTERLEAVED[architecture])


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Parses the metadata.

    Raises:
        ModelFileError: a missing or impossible value, or a model that jaxspec does not support.
    """
    # Every value read here is one number or text; an array in its place is as good as missing.
    meta = {
        key: value
        for key, value in file.metadata.items()
        if not isinstance(value, list | np.ndarray)
    }
    architecture = meta.get("general.architecture")
    if architecture not in INTERLEAVED:
        raise ModelFileError(
            file.path,
            f"GGUF architecture {architecture!r} is not supported",
            "jaxspec reads GGUF files of " + " and ".join(INTERLEAVED),
        )
    if experts := meta.get(f"{architecture}.expert_count", 0):  # written for mixtures only
        raise ModelFileError(
            file.path, f"is a mixture of {experts} experts", "jaxspec runs dense models"
        )
    kind = meta.get(f"{architecture}.rope.scaling.type", "none")  # written when there is one
    if kind != "none":
        raise ModelFileError(
            file.path, f"rope scaling {kind!r} is not supported", "use a model without it"
        )
    try:
        config = _parse(file, meta, architecture)
    except KeyError as error:
        raise ModelFileError(
            file.path, f"metadata {error} is missing", "the file is incomplete, fetch it again"
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelFileError(file.path, str(error), "the metadata is corrupt") from None
    check_model(config, file.path)
    return config


def _parse(file: GgufFile, meta: dict[str, Any], architecture: str) -> ModelConfig:
    hidden_size = int(meta[f"{architecture}.embedding_length"])
    num_heads = int(meta[f"{architecture}.attention.head_count"])
    # Optional in the format: key_length where it is not width / heads, head_count_kv where
    # heads are grouped, vocab_size where it is not the tokenizer's.
    head_dim = int(
        meta.get(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1))
    )
    rotated = int(meta.get(f"{architecture}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ValueError(f"only {rotated} of {head_dim} head dimensions are rotated")
    theta = float(meta.get(f"{architecture}.rope.freq_base", 10_000.0))  # llama.cpp's default
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(
            meta.get(f"{architecture}.vocab_size", len(file.metadata["tokenizer.ggml.tokens"]))
        ),
        hidden_size=hidden_size,
        intermediate_size=int(meta[f"{architecture}.feed_forward_length"]),
        num_layers=int(meta[f"{architecture}.block_count"]),
        num_heads=num_heads,
        num_kv_heads=int(meta.get(f"{architecture}.attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rope_theta=theta,
        # Stored in float32; the shortest decimal of that is what the model's authors wrote.
        rms_norm_eps=_shortest(meta[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        max_position_embeddings=int(meta[f"{architecture}.context_length"]),
        tie_word_embeddings=f"{GGUF_NAMES.lm_head}.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, head_dim, theta),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_token_ids=merge_token_ids(
            meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id")
        ),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
    )


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    """Recovers Llama 3's scaling from the divisors that the converter wrote out.

    The file holds one divisor per frequency instead of the four numbers they were made from. All
    of Llama 3.1 to 3.3 differ in `factor` only, which is the largest divisor.
    """
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    divisors = tensor.read().astype(np.float64)
    if (divisors == 1.0).all():
        return None
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    inv_freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * np.pi)
    kept = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
        0.0,
        1.0,
    )
    expected = 1.0 / ((1.0 - kept) / scaling.factor + kept)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError("rope_freqs.weight is not Llama 3's rope scaling, the only one supported")
    return scaling
