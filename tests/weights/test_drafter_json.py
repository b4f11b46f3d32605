"""DFlash configs: keys in both places, what must fit the target, what is refused (F14, F24)."""

import dataclasses
import json
import logging

import pytest

from jaxspec.models.config import RopeScaling
from jaxspec.weights.drafter_json import detect_drafter, read_dflash_config
from jaxspec.weights.files import ModelFileError
from tests.models.checkpoints import CONFIGS, DFLASH
from tests.weights.folders import DFLASH_JSON

TARGET = dataclasses.replace(CONFIGS["llama"], num_layers=9)
NESTED = DFLASH_JSON["dflash_config"]


def write(folder, drop=(), nested=None, **changes):
    config = {key: value for key, value in DFLASH_JSON.items() if key not in drop} | changes
    if nested is not None:
        config["dflash_config"] = nested
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse(folder, *, token_id=None, **changes):
    return read_dflash_config(write(folder, **changes), TARGET, token_id=token_id)


def test_a_config_becomes_the_values_written_by_hand(tmp_path):
    assert parse(tmp_path) == DFLASH
    assert detect_drafter(tmp_path) == "dflash"


def test_keys_may_stand_at_the_top(tmp_path):
    assert parse(tmp_path, drop=["dflash_config"], **NESTED) == DFLASH


def test_nested_keys_win(tmp_path):
    config = parse(tmp_path, target_layer_ids=[2], mask_token_id=9)
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 4), 5)


def test_the_nested_block_size_wins_with_a_warning(tmp_path, caplog):
    """F14: block size counts the bonus token; two places may disagree."""
    nested = {**NESTED, "block_size": 8}
    assert parse(tmp_path, nested=nested, block_size=16).block_size == 8
    expected = "block_size is 8 in dflash_config and 16 at the top; dflash_config's 8 is used"
    assert caplog.messages == [expected]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert parse(tmp_path, nested=nested, block_size=8).block_size == 8
        top_only = {key: value for key, value in NESTED.items() if key != "block_size"}
        assert parse(tmp_path, nested=top_only, block_size=16).block_size == 16
    assert caplog.messages == []


def test_rotary_settings_are_the_drafters_own(tmp_path):
    """F24: a drafter's theta, head size and scaling need not be the target's."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 123.0,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = parse(tmp_path, drop=["rope_theta"], rope_parameters=rope, head_dim=16)
    assert (config.rope_theta, config.head_dim) == (123.0, 16)
    assert config.rope_scaling == RopeScaling(2.0, 1.0, 4.0, 32)
    assert (TARGET.rope_theta, TARGET.head_dim) == (10000.0, 8)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (7, None, 7), (True, False, True)),
        ({"is_causal": False}, (7, None, 7), (False, False, False)),
        ({"is_causal": True}, (7, None, 7), (True, True, True)),
        ({"layer_types": [FULL] * 3}, (None,) * 3, (False,) * 3),
        ({"layer_types": None, "use_sliding_window": False}, (None,) * 3, (False,) * 3),
        ({"layer_types": None}, (None,) * 3, (False,) * 3),
        ({"layer_types": None, "max_window_layers": 1}, (None, 7, 7), (False, True, True)),
    ],
    ids=["by type", "not causal", "causal", "full", "switched off", "default", "from layer 1"],
)
def test_each_layer_gets_its_window_and_causality(tmp_path, changes, windows, causal):
    config = parse(tmp_path, **changes)
    assert (config.layer_windows, config.layer_causal) == (windows, causal)


def test_a_window_without_a_switch_counts(tmp_path):
    assert parse(tmp_path, drop=["use_sliding_window"]).layer_windows == (7, None, 7)


def no_mask_id(**extra):
    return {key: value for key, value in NESTED.items() if key != "mask_token_id"} | extra


TOKENS = {"<|MASK|>": 11, "<mask>": 12, "<far>": 97}


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        (NESTED, 5),
        (no_mask_id(), 11),
        (no_mask_id(mask_token="<mask>"), 12),
        (no_mask_id(mask_token="<mask>", mask_token_id=12), 12),
        (no_mask_id(mask_token="<unknown>", mask_token_id=5), 5),
    ],
    ids=["id", "default text", "text", "both", "unknown text"],
)
def test_the_mask_token_is_an_id_or_looked_up(tmp_path, nested, expected):
    assert parse(tmp_path, nested=nested, token_id=TOKENS.get).mask_token_id == expected


def ids(value):
    return {**NESTED, "target_layer_ids": value}


REFUSED = {
    "mask unknown": (
        {"nested": no_mask_id(mask_token="<unknown>")},
        "mask_token_id is missing, and the tokenizer has no token '<unknown>'",
    ),
    "mask conflict": (
        {"nested": no_mask_id(mask_token="<mask>", mask_token_id=5)},
        "mask_token_id is 5, but the tokenizer's id of '<mask>' is 12",
    ),
    "mask outside": (
        {"nested": no_mask_id(mask_token="<far>")},
        "mask_token_id is 97, outside the target's vocabulary of 97",
    ),
    "hidden size": ({"hidden_size": 64}, "whose hidden_size is 64, this target's is 32; name the"),
    "feature width": ({"target_hidden_size": 48}, "whose target_hidden_size is 48, .* is 32"),
    "layers": ({"num_target_layers": 36}, "whose num_target_layers is 36, this target's is 9"),
    "nested layers": (
        {"nested": {**NESTED, "num_target_layers": 36}},
        "whose num_target_layers is 36, this target's is 9",
    ),
    "vocabulary": ({"vocab_size": 99}, "whose vocab_size is 99, this target's is 97"),
    "taps missing": (
        {"nested": {"mask_token_id": 5, "block_size": 6}},
        "key 'target_layer_ids' is missing; it cannot be guessed",
    ),
    "taps empty": ({"nested": ids([])}, r"target_layer_ids is \[\], not a list of layers"),
    "taps not numbers": ({"nested": ids(["1"])}, r"target_layer_ids is \['1'\], not a list of"),
    "tap negative": ({"nested": ids([-1, 4])}, "target_layer_ids has -1, .* layers are 0 to 8"),
    "tap too high": ({"nested": ids([1, 9])}, "target_layer_ids has 9, the target's layers are 0"),
    "no block size": (
        {"nested": {"mask_token_id": 5, "target_layer_ids": [1]}},
        "key 'block_size' is missing",
    ),
    "block of one": ({"nested": {**NESTED, "block_size": 1}}, "block_size is 1, which leaves no"),
    "position 0 predicts": (
        {"nested": {**NESTED, "sample_from_anchor": True}},
        "sample_from_anchor is True: position 0 of the block predicts",
    ),
    "shifted labels": ({"shift_label": True}, "shift_label is True: position 0 of the block"),
    "softcap": (
        {"nested": {**NESTED, "final_logit_softcapping": 30.0}},
        "final_logit_softcapping is 30.0, which is not supported",
    ),
    "scale": ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0, which is not"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}},
        "rope scaling of type 'yarn' is not supported",
    ),
    "no theta": ({"drop": ["rope_theta"]}, "key 'rope_theta' is missing"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
    "heads": ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 KV heads"),
    "kinds of layers": (
        {"layer_types": [FULL, "linear_attention", FULL]},
        "layer_types is .*linear_attention.*, not the kinds of 3 layers",
    ),
    "number of kinds": ({"layer_types": [FULL]}, "layer_types is .*, not the kinds of 3 layers"),
    "contradiction": (
        {"use_sliding_window": False},
        "layer_types has sliding_attention, but use_sliding_window is false",
    ),
    "no window": ({"drop": ["sliding_window"]}, "key 'sliding_window' is missing"),
    "window of none": ({"sliding_window": 0}, "sliding_window is 0, below 1"),
    "causal word": ({"is_causal": "no"}, "is_causal is 'no', not true or false"),
    "DFlash2 by class": (
        {"architectures": ["DFlash2DraftModel"]},
        "the drafter is DFlash2, which is not supported; jaxspec runs DFlashDraftModel",
    ),
    "DFlash2 by key": ({"nested": {**NESTED, "selector_rank": 256}}, "the drafter is DFlash2"),
    "Domino": ({"nested": {**NESTED, "projector_type": "domino"}}, "the drafter is Domino"),
    "Domino by key": ({"nested": {**NESTED, "gru_hidden_dim": 1024}}, "the drafter is Domino"),
    "DSpark": ({"nested": {**NESTED, "projector_type": "dspark"}}, "the drafter is DSpark"),
    "DSpark by class": ({"architectures": ["Qwen3DSparkModel"]}, "the drafter is DSpark"),
    "EAGLE-3": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "the drafter is eagle3, not dflash",
    ),
    "speculators": (
        {"drop": ["architectures"], "speculators_model_type": "dflash"},
        r"in the layout of the speculators library \(dflash\), not supported",
    ),
    "a language model": (
        {"architectures": ["LlamaForCausalLM"]},
        "LlamaForCausalLM is not a drafter that jaxspec knows",
    ),
    "no object": ({"nested": [1]}, r"dflash_config is \[1\], not an object"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path, fault):
    changes, message = REFUSED[fault]
    with pytest.raises(ModelFileError, match=message):
        parse(tmp_path, token_id=TOKENS.get, **changes)


def test_without_a_tokenizer_a_mask_named_by_text_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"no token '<\|MASK\|>'"):
        parse(tmp_path, nested=no_mask_id())
