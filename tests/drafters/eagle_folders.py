"""The fixtures of `make_eagle_fixtures.py` as checkpoint folders, as their tools save them."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.drafters.eagle_checkpoint import load_eagle
from jaxspec.drafters.multi_layer_eagle_checkpoint import load_multi_layer_eagle
from jaxspec.models.config import ModelConfig
from tests.models.checkpoints import load

LAYER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
SPECFORGE = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "rope_theta": 5000.0,
    "draft_vocab_size": 40,
    "target_hidden_size": 24,
    "tie_word_embeddings": False,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    },
}
CONFIGS = {
    "plain": SPECFORGE,
    "fc_norm": {**SPECFORGE, "fc_norm": True},
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 97,
        "target_hidden_size": 24,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 5],
        "transformer_layer_config": {
            **LAYER,
            "model_type": "qwen3",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "layer_types": ["full_attention"],
        },
    },
    "eagle": {**LAYER, "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"},
    "multi_layer": {
        **LAYER,
        "architectures": ["MultiLayerEagleDraftModel"],
        "num_nextn_predict_layers": 3,
        "chain_hidden_states": False,
        "qk_norm": True,
        "rope_theta": 1000000.0,
    },
}
MTP_NAMES = {
    "mtp_layers": "model.mtp.layers",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
}


def target_of(case: str, **changes) -> ModelConfig:
    """A target that the drafter of a case fits; only its sizes matter."""
    sizes = dict(
        architecture="llama",
        vocab_size=97,
        hidden_size=32 if case in ("eagle", "multi_layer") else 24,
        intermediate_size=48,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return ModelConfig(**{**sizes, **changes})


def tensors_of(case: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors under their published names."""
    if case == "multi_layer":
        return {
            functools.reduce(lambda n, pair: n.replace(*pair), MTP_NAMES.items(), name[2:]): value
            for name, value in load("mtp").items()
            if name.startswith("w.mtp_layers")
        }
    name, prefix = {
        "plain": ("eagle3", "plain.w."),
        "fc_norm": ("eagle3", "fc_norm.w."),
        "speculators": ("eagle3_speculators", "w."),
        "eagle": ("eagle", "w."),
    }[case]
    file = load(name)
    return {k.removeprefix(prefix): v for k, v in file.items() if k.startswith(prefix)}


def config_of(case: str) -> dict:
    """A copy of the case's `config.json`."""
    return copy.deepcopy(CONFIGS[case])


def save(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@functools.cache
def loaded(case: str):
    """A case's (config, params) through its checkpoint folder."""
    load_drafter = load_multi_layer_eagle if case == "multi_layer" else load_eagle
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), config_of(case), tensors_of(case))
        return load_drafter(Path(folder), target_of(case), "float32")


def fixture_of(case: str) -> dict[str, np.ndarray]:
    """Inputs and the original's results: features, token_ids, outputs and, with a head, logits."""
    if case in ("plain", "fc_norm"):
        file = load("eagle3")
        return {**file, "outputs": file[f"{case}.outputs"], "logits": file[f"{case}.logits"]}
    return load("eagle3_speculators" if case == "speculators" else "eagle")
