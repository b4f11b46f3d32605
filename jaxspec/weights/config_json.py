"""Parses Hugging Face `config.json`: one function per architecture, nothing guessed. Host only."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from jaxspec.models.config import Json, ModelConfig, RopeScaling
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.json_fields import boolean, integer, merge_token_ids, number, read_json

_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def read_model_config(folder: Path) -> ModelConfig:
    """Parses the `config.json` of a folder, with the stop ids of `generation_config.json`.

    Raises:
        ModelFileError: a missing or impossible value, or a model that jaxspec does not support.
    """
    path = folder / "config.json"
    config = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(config, generation, file=path)


def parse_model_config(config: Json, generation: Json, *, file: Path) -> ModelConfig:
    """Turns HF's dictionaries into a `ModelConfig`.

    Args:
        config: `config.json`.
        generation: `generation_config.json`, {} when there is none.
        file: named in errors.

    Raises:
        ModelFileError: as `read_model_config`.
    """
    refuse_quantization(config, file)
    architecture = architecture_of(config, file)
    if architecture not in PARSERS:
        moe = next((key for key in _MOE_KEYS if config.get(key)), None)
        if moe or "Moe" in architecture:
            raise ModelFileError(
                file,
                f"{architecture} is a mixture of experts ({moe} {config.get(moe)})"
                if moe
                else f"{architecture} is a mixture of experts",
                "jaxspec runs dense models: " + ", ".join(PARSERS),
            )
        raise ModelFileError(
            file,
            f"architecture {architecture} is not supported",
            "jaxspec runs " + ", ".join(PARSERS),
        )
    try:
        model = PARSERS[architecture](config, generation)
    except KeyError as error:
        raise ModelFileError(
            file, f"key {error} is missing", f"{architecture} needs it, fetch the file again"
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelFileError(file, str(error), "the config is not one jaxspec can run") from None
    check_model(model, file)
    return model


def parse_llama(d: Json, generation: Json) -> ModelConfig:
    """LlamaForCausalLM: Llama 2 and 3, SmolLM2 and others of that shape."""
    if d.get("mlp_bias", False):  # HF's default: none
        raise ValueError("mlp_bias is true, Llama MLPs with biases are not supported")
    hidden_size, num_heads = integer(d, "hidden_size"), integer(d, "num_attention_heads")
    return _parse_common(
        d,
        generation,
        architecture="llama",
        # Llama 1 and 2 leave these out: no grouping, and the heads share the width.
        num_kv_heads=integer(d, "num_key_value_heads", num_heads),
        head_dim=integer(d, "head_dim", hidden_size // max(num_heads, 1)),
        rope_theta=10_000.0,  # HF's default, left out by Llama 2
        qk_norm=False,
    )


def parse_qwen3(d: Json, generation: Json) -> ModelConfig:
    """Qwen3ForCausalLM: the dense Qwen3 models."""
    if d.get("use_sliding_window", False):  # published Qwen3 models say false
        raise ValueError(
            f"use_sliding_window is true (window {d.get('sliding_window')}), "
            "targets with sliding windows are not supported"
        )
    return _parse_common(
        d,
        generation,
        architecture="qwen3",
        num_kv_heads=integer(d, "num_key_value_heads"),
        head_dim=integer(d, "head_dim"),
        rope_theta=None,
        qk_norm=True,
    )


PARSERS = {"LlamaForCausalLM": parse_llama, "Qwen3ForCausalLM": parse_qwen3}


def _parse_common(
    d: Json,
    generation: Json,
    *,
    architecture: str,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float | None,
    qk_norm: bool,
) -> ModelConfig:
    if (activation := d.get("hidden_act", "silu")) != "silu":  # HF's default
        raise ValueError(f"hidden_act is {activation!r}, only 'silu' is supported")
    if "sliding_attention" in (d.get("layer_types") or ()):  # left out before transformers 4.53
        raise ValueError("layer_types has sliding_attention, which targets do not support")
    theta, scaling = parse_rope(d, default_theta=rope_theta)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(d, "vocab_size"),
        hidden_size=integer(d, "hidden_size"),
        intermediate_size=integer(d, "intermediate_size"),
        num_layers=integer(d, "num_hidden_layers"),
        num_heads=integer(d, "num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rms_norm_eps=number(d, "rms_norm_eps"),
        max_position_embeddings=integer(d, "max_position_embeddings"),
        # HF's default for both architectures; the tensors are held against it.
        tie_word_embeddings=boolean(d, "tie_word_embeddings", False),
        rope_scaling=scaling,
        attention_bias=boolean(d, "attention_bias", False),  # HF's default, before the key existed
        qk_norm=qk_norm,
        # Chat models often name the end of a turn in generation_config.json only.
        eos_token_ids=merge_token_ids(d.get("eos_token_id"), generation.get("eos_token_id")),
        bos_token_id=d.get("bos_token_id"),  # null where the tokenizer adds none
    )


def parse_rope(d: Json, *, default_theta: float | None) -> tuple[float, RopeScaling | None]:
    """Reads the rotary settings, as `rope_theta` + `rope_scaling` or as `rope_parameters`.

    Args:
        d: a config.
        default_theta: for architectures whose config may leave it out; None: required.

    Raises:
        KeyError: a required key is missing.
        ValueError: a kind of scaling other than Llama 3's.
    """
    # transformers 5 moved both into one dictionary; a flat key beside it repeats the same value.
    rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters differ between kinds of layers, which is not supported")
    source = {**d, **rope}
    theta = number(source, "rope_theta", default_theta)
    if (partial := source.get("partial_rotary_factor", 1.0)) != 1.0:  # absent: all of the head
        raise ValueError(f"partial_rotary_factor is {partial}, only 1.0 is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))  # "type" until transformers 4.43
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope scaling of type {kind!r} is not supported, only 'llama3' is")
    return theta, RopeScaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_position_embeddings=integer(rope, "original_max_position_embeddings"),
    )


def architecture_of(config: Json, file: Path) -> str:
    """The one class name of a checkpoint.

    Raises:
        ModelFileError: none, or several, are named.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelFileError(
            file,
            f"architectures is {names!r}, not a list of one name",
            "write the model's class there, for example LlamaForCausalLM",
        )
    return names[0]


def refuse_quantization(config: Json, file: Path) -> None:
    """Names the quantisation of a checkpoint that has one.

    Raises:
        ModelFileError: FP8, AWQ, GPTQ or any other `quantization_config`.
    """
    for key in ("quantization_config", "compression_config"):
        if quantization := config.get(key):
            method = quantization
            if isinstance(quantization, dict):
                method = quantization.get("quant_method", "unnamed")
            raise ModelFileError(
                file,
                f"the weights are quantised ({method}), which is not supported",
                "use the bfloat16 original, or a GGUF file",
            )


class DecoderSizes(Protocol):
    """What the configs of a target and of any drafter have in common."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def attention_bias(self) -> bool: ...


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def check_sizes(sizes: DecoderSizes, file: Path) -> None:
    """Holds sizes against what is possible at all.

    Raises:
        ModelFileError: a size below one, heads that do not group, or an odd head size.
    """
    fetch_again = "the config is corrupt, fetch it again"
    for name in _SIZES:
        if (value := getattr(sizes, name)) < 1:
            raise ModelFileError(file, f"{name} is {value}, below 1", fetch_again)
    if sizes.num_heads % sizes.num_kv_heads:
        raise ModelFileError(
            file,
            f"{sizes.num_heads} query heads do not divide into {sizes.num_kv_heads} KV heads",
            fetch_again,
        )
    if sizes.head_dim % 2:
        raise ModelFileError(
            file, f"head_dim is {sizes.head_dim}, rotary embedding needs it even", fetch_again
        )


def check_model(model: ModelConfig, file: Path) -> None:
    """Holds a language model's config against what is possible.

    Raises:
        ModelFileError: as `check_sizes`, or a stop id outside the vocabulary.
    """
    check_sizes(model, file)
    for token in model.eos_token_ids:
        if not 0 <= token < model.vocab_size:
            raise ModelFileError(
                file,
                f"stop id {token} is outside the vocabulary of {model.vocab_size}",
                "correct eos_token_id here or in generation_config.json",
            )
