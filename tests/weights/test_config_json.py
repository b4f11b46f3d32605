"""HF config.json: both spellings of every key, defaults with reasons, refusals by name."""

import json
from pathlib import Path

import pytest

from jaxspec.models.config import ModelConfig, RopeScaling
from jaxspec.weights.config_json import parse_model_config, read_model_config
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.json_fields import read_json
from tests.models.checkpoints import CONFIGS
from tests.weights.folders import LLAMA_JSON, QWEN3_JSON

FILE = Path("folder/config.json")


def parse(config, generation=None, **changes) -> ModelConfig:
    return parse_model_config({**config, **changes}, generation or {}, file=FILE)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_and_qwen3_configs_become_the_same_values_as_written_by_hand():
    llama = parse(LLAMA_JSON, eos_token_id=None, bos_token_id=None)
    assert llama == CONFIGS["llama"]
    assert parse(QWEN3_JSON) == CONFIGS["qwen3"]


def test_rope_settings_are_read_as_transformers_5_writes_them():
    rope = {**LLAMA_JSON["rope_scaling"], "rope_theta": 500000.0}
    config = parse(without(LLAMA_JSON, "rope_scaling", "rope_theta"), rope_parameters=rope)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_the_old_name_of_the_rope_type_is_read():
    assert parse(QWEN3_JSON, rope_scaling={"type": "default"}).rope_scaling is None
    with pytest.raises(ModelFileError, match="rope scaling of type 'linear' is not supported"):
        parse(QWEN3_JSON, rope_scaling={"type": "linear", "factor": 2.0})


def test_llama_2_may_leave_out_what_later_configs_say():
    config = parse(
        without(LLAMA_JSON, "head_dim", "num_key_value_heads", "rope_theta", "rope_scaling")
        | {"attention_bias": None}
    )
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (8, 4, 10000.0)
    assert not config.attention_bias


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, None, (2,)),
        ([3, 2], 2, (3, 2)),
        (2, [5, 2, 4], (2, 5, 4)),
        (None, [1], (1,)),
        (None, None, ()),
    ],
)
def test_stop_ids_of_both_files_are_joined(config_eos, generation_eos, expected):
    generation = {"eos_token_id": generation_eos}
    assert parse(LLAMA_JSON, generation, eos_token_id=config_eos).eos_token_ids == expected


def test_a_folder_is_read_with_its_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_JSON))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8]}')
    assert read_model_config(tmp_path).eos_token_ids == (2, 8)


REFUSED = {
    "fp8": (
        LLAMA_JSON,
        {"quantization_config": {"quant_method": "fp8"}},
        r"the weights are quantised \(fp8\), which is not supported; use the bfloat16",
    ),
    "awq": (LLAMA_JSON, {"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
    "gptq": (LLAMA_JSON, {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    "odd quantisation": (LLAMA_JSON, {"quantization_config": "int4"}, r"quantised \(int4\)"),
    "experts by class": (
        QWEN3_JSON,
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
        r"Qwen3MoeForCausalLM is a mixture of experts \(num_experts 128\); jaxspec runs dense",
    ),
    "experts by key": (
        LLAMA_JSON,
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        r"MixtralForCausalLM is a mixture of experts \(num_local_experts 8\)",
    ),
    "architecture": (
        LLAMA_JSON,
        {"architectures": ["MambaForCausalLM"]},
        "architecture MambaForCausalLM is not supported; jaxspec runs LlamaForCausalLM, Qwen3",
    ),
    "no architecture": (LLAMA_JSON, {"architectures": None}, "architectures is None, not a list"),
    "two": (LLAMA_JSON, {"architectures": ["A", "B"]}, r"architectures is \['A', 'B'\], not a"),
    "mlp bias": (LLAMA_JSON, {"mlp_bias": True}, "mlp_bias is true"),
    "activation": (LLAMA_JSON, {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
    "window": (
        QWEN3_JSON,
        {"use_sliding_window": True, "sliding_window": 4096},
        r"use_sliding_window is true \(window 4096\)",
    ),
    "sliding layers": (
        QWEN3_JSON,
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types has sliding_attention",
    ),
    "yarn": (
        QWEN3_JSON,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling of type 'yarn' is not supported, only 'llama3' is",
    ),
    "rope by layer": (
        QWEN3_JSON,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters differ between kinds of layers",
    ),
    "partial rotary": (
        LLAMA_JSON,
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, only 1.0",
    ),
    "a word for a size": (LLAMA_JSON, {"hidden_size": "32"}, "hidden_size is '32', not a whole"),
    "true for a size": (LLAMA_JSON, {"hidden_size": True}, "hidden_size is True, not a whole"),
    "a word for a number": (LLAMA_JSON, {"rms_norm_eps": "e"}, "rms_norm_eps is 'e', not a number"),
    "a number for a switch": (
        LLAMA_JSON,
        {"tie_word_embeddings": 1},
        "tie_word_embeddings is 1, not true or false",
    ),
    "a word for a stop id": (LLAMA_JSON, {"eos_token_id": ["x"]}, "token id 'x' is no whole"),
    "stop id outside": (LLAMA_JSON, {"eos_token_id": 97}, "stop id 97 is outside the vocabulary"),
    "no heads": (without(LLAMA_JSON, "head_dim"), {"num_attention_heads": 0}, "num_heads is 0"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_unsupported_configs_are_refused_by_name(fault):
    config, changes, message = REFUSED[fault]
    with pytest.raises(ModelFileError, match=message):
        parse(config, **changes)


@pytest.mark.parametrize(
    ("config", "key"),
    [(LLAMA_JSON, "hidden_size"), (QWEN3_JSON, "head_dim"), (QWEN3_JSON, "rope_theta")],
)
def test_a_missing_required_key_is_named(config, key):
    with pytest.raises(ModelFileError, match=f"folder/config.json: key '{key}' is missing"):
        parse(without(config, key))


def test_broken_json_files_are_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ModelFileError, match=r"config.json: no such file; the model folder is"):
        read_json(path)
    path.write_text('{"a": ')
    with pytest.raises(ModelFileError, match=r"config.json: is not JSON .*truncated or corrupt"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(ModelFileError, match=r"config.json: holds a list, not an object"):
        read_json(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelFileError, match=r"config.json: cannot be read \(Is a directory\)"):
        read_json(path)
