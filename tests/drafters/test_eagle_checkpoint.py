"""EAGLE checkpoints: the layouts of several tools, and refusals that name both sides."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec.config import ConfigError, EngineConfig, Kernels
from jaxspec.drafters.eagle_checkpoint import load_eagle
from jaxspec.drafters.multi_layer_eagle_checkpoint import load_multi_layer_eagle
from jaxspec.drafters.registry import DRAFTERS, plan_drafter
from jaxspec.weights.files import ModelFileError
from tests.drafters.eagle_folders import config_of, loaded, save, target_of, tensors_of
from tests.drafters.eagle_rig import BORROWED

TAPS = "eagle_aux_hidden_state_layer_ids"


def write(folder, case: str, *, drop=(), tensors=(), lose=(), **changes):
    """A case's folder with keys changed or dropped, tensors changed or lost."""
    config = {**config_of(case), **changes}
    kept = {**tensors_of(case), **dict(tensors)}
    for key in drop:
        del config[key]
    return save(folder, config, {k: v for k, v in kept.items() if k not in lose})


def load(folder, case: str, target=None, **changes):
    load_drafter = load_multi_layer_eagle if case == "multi_layer" else load_eagle
    return load_drafter(write(folder, case, **changes), target or target_of(case), "float32")


@pytest.mark.parametrize(
    ("case", "name", "feature_layers", "block_size", "kv_bytes"),
    [
        ("plain", "eagle3", (1, 3, 4), 6, 128),
        ("speculators", "eagle3", (1, 4), 6, 128),
        ("eagle", "eagle", (6,), 6, 128),
        ("multi_layer", "multi_layer_eagle", (5,), 4, 3 * 128),
    ],
)
def test_a_folder_says_which_drafter_it_is(
    tmp_path, case, name, feature_layers, block_size, kv_bytes
):
    config = EngineConfig(drafter=str(write(tmp_path, case)))
    found, plan = plan_drafter(config, target_of(case), "float32")
    assert found == name and found in DRAFTERS
    assert (plan.feature_layers, plan.block_size) == (feature_layers, block_size)
    assert plan.kv_bytes_per_token == kv_bytes
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    assert plan.kernel_shapes == {op: heads for op in ("paged_attention", "kv_write")}
    drafter = plan.build(BORROWED, 4, Kernels())
    assert (drafter.name, drafter.block_size) == (name, block_size)


def test_the_asked_block_size_must_suit_the_layers(tmp_path):
    config = EngineConfig(drafter=str(write(tmp_path, "multi_layer")), block_size=5)
    with pytest.raises(ConfigError, match=r"block size 5 .* has 3 layers, one a draft; use 2 to 4"):
        plan_drafter(config, target_of("multi_layer"), "float32")


def test_layers_one_a_draft_make_no_trees(tmp_path):
    config = EngineConfig(drafter=str(write(tmp_path, "multi_layer")), tree_nodes=4)
    with pytest.raises(ConfigError, match="tree_nodes is 4, but the drafter multi_layer_eagle dra"):
        plan_drafter(config, target_of("multi_layer"), "float32")


def test_draft_ids_and_target_ids_are_maps_of_each_other():
    """d2t holds offsets; its ids are those that t2d marks, in order."""
    tensors, params = tensors_of("plain"), loaded("plain")[1]
    np.testing.assert_array_equal(params.target_ids, tensors["d2t"] + np.arange(40))
    np.testing.assert_array_equal(params.target_ids, np.flatnonzero(tensors["t2d"]))
    assert params.target_ids.dtype == np.int32
    assert loaded("speculators")[1].target_ids is None


@pytest.mark.parametrize(
    ("changes", "num_layers", "expected"),
    [
        ({"eagle_config": {TAPS: [0, 2, 5]}}, 6, (0, 2, 5)),
        ({"eagle_config": None, TAPS: [1, 3, 6]}, 6, (0, 2, 5)),
        ({"eagle_config": None}, 30, (1, 14, 26)),
        ({"eagle_config": None}, 7, (1, 2, 3)),
    ],
    ids=["in eagle_config: outputs", "at the top: one more", "default", "smallest default"],
)
def test_taps_are_outputs_of_0_based_layers(tmp_path, changes, num_layers, expected):
    """F13: ids as SGLang and SpecForge count, as vLLM and speculators do, and the default."""
    config, _ = load(tmp_path, "plain", target_of("plain", num_layers=num_layers), **changes)
    assert config.feature_layers == expected


def test_other_spellings_of_the_same_tensors_are_known(tmp_path):
    tensors = tensors_of("fc_norm")
    spelled = {}
    for name, value in tensors.items():
        for i, old in enumerate(["low", "mid", "high"]):
            name = name.replace(f"fc_norm.{i}.", f"aux_norm_{old}.")
        spelled[f"model.{name}"] = value
    config = {**config_of("fc_norm"), "use_aux_norm": True}
    del config["fc_norm"]
    save(tmp_path, config, spelled)
    _, params = load_eagle(tmp_path, target_of("fc_norm"), "float32")
    np.testing.assert_array_equal(params.fc_norms[2], tensors["fc_norm.2.weight"])
    np.testing.assert_array_equal(params.lm_head, tensors["lm_head.weight"])


def test_biases_norms_and_windows_are_read_where_the_config_has_them(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    extra = {
        f"midlayer.self_attn.{name}.bias": rng.normal(size=size).astype(np.float32)
        for name, size in sizes.items()
    }
    extra["fc.bias"] = rng.normal(size=32).astype(np.float32)
    extra["input_norm.weight"] = rng.normal(size=72).astype(np.float32)
    changes = dict(
        attention_bias=True,
        bias=True,
        norm_before_fc=True,
        norm_output=True,
        layer_types=["sliding_attention"],
        sliding_window=9,
    )
    config, params = load(tmp_path, "plain", tensors=extra, **changes)
    assert config.window == 9 and config.norm_output
    names = [f"midlayer.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")]
    joined = np.concatenate([extra[name] for name in names])
    np.testing.assert_array_equal(params.layer.qkv_bias, joined)
    np.testing.assert_array_equal(params.layer.o_bias, extra["midlayer.self_attn.o_proj.bias"])
    np.testing.assert_array_equal(params.fc_bias, extra["fc.bias"])
    np.testing.assert_array_equal(params.taps_norm, extra["input_norm.weight"])


@pytest.mark.parametrize("stored", [True, False], ids=["own head", "no head"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_which_head_drafts(tmp_path, stored, tied):
    """F26: a stored head; without one, a tied drafter's embedding, else the target's head."""
    head = np.random.default_rng(1).normal(size=(97, 32)).astype(np.float32)
    lose = {"d2t", "t2d"} if stored else {"d2t", "t2d", "lm_head.weight"}
    tensors = {"lm_head.weight": head, "fc.weight": np.zeros((32, 96), np.float32)}
    target = target_of("plain", hidden_size=32)
    _, params = load(
        tmp_path,
        "plain",
        target,
        tensors=tensors,
        lose=lose,
        tie_word_embeddings=tied,
        draft_vocab_size=None,
        target_hidden_size=None,
    )
    if stored:
        np.testing.assert_array_equal(params.lm_head, head)
    elif tied:
        assert params.lm_head is params.embed
    else:
        assert params.lm_head is None


def test_the_target_lends_its_embedding_where_none_is_stored(tmp_path):
    _, params = load(tmp_path, "eagle", lose={"embed_tokens.weight"})
    assert params.embed is None and params.lm_head is None


IDS = tensors_of("plain")["d2t"]
MARKS = tensors_of("plain")["t2d"]
LENT = dict(target=target_of("plain", hidden_size=32), target_hidden_size=32)
WIDE_FC = {"fc.weight": np.zeros((32, 96), np.float32)}
REFUSED = {
    "another kind": (
        "plain",
        {"architectures": ["DFlashDraftModel"]},
        "the drafter is dflash, not EAGLE",
    ),
    "missing key": ("plain", {"drop": ["intermediate_size"]}, "key 'intermediate_size' is missing"),
    "activation": ("plain", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
    "biased MLP": ("plain", {"mlp_bias": True}, "mlp_bias is True, only False"),
    "without taps": (
        "plain",
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state is False, only True",
    ),
    "layer count": ("plain", {"num_hidden_layers": 2}, "num_hidden_layers is 2, .* has 1"),
    "draft vocabulary": (
        "plain",
        {"draft_vocab_size": 98},
        "draft_vocab_size is 98, of vocab_size 97 it can be 1 to all",
    ),
    "two norms": (
        "plain",
        {"fc_norm": True, "norm_before_fc": True},
        "norm_before_fc and fc_norm are both true",
    ),
    "no default taps": (
        "plain",
        {"eagle_config": None},
        f"{TAPS} is missing, and its default needs 7 layers or more, the target has 6",
    ),
    "number of taps": (
        "plain",
        {"num_aux_hidden_states": 2},
        "num_aux_hidden_states is 2, but there are 3 taps",
    ),
    "taps no list": ("plain", {"eagle_config": {TAPS: "1"}}, f"{TAPS} is '1', not a list of"),
    "tap too high": (
        "plain",
        {"eagle_config": {TAPS: [1, 6]}},
        f"eagle_config.{TAPS} has 6, of this target it can have 0 to 5",
    ),
    "tap of the embedding": (
        "speculators",
        {TAPS: [0, 3]},
        f"{TAPS} has 0, of this target it can have 1 to 6",
    ),
    "no object": ("plain", {"eagle_config": [1]}, r"eagle_config is \[1\], not an object"),
    "kind of layer": (
        "plain",
        {"layer_types": ["linear_attention"]},
        "layer_types is .*, not the kind of one layer",
    ),
    "window of none": (
        "plain",
        {"layer_types": ["sliding_attention"], "sliding_window": 0},
        "sliding_window is 0, below 1",
    ),
    "target width": (
        "plain",
        {"target_hidden_size": 48},
        "a target whose hidden_size is 48, this target's is 24",
    ),
    "target vocabulary": (
        "plain",
        {"vocab_size": 96},
        "a target whose vocab_size is 96, this target's is 97",
    ),
    "target layers": (
        "plain",
        {"num_target_layers": 5},
        "a target whose num_target_layers is 5, this target's is 6",
    ),
    "heads": ("plain", {"num_key_value_heads": 3}, "4 query heads do not divide into 3 KV heads"),
    "quantised": ("plain", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
    "taps of another count": (
        "plain",
        {"eagle_config": {TAPS: [1, 3]}},
        r"fc.weight \(32, 72\) instead of \(32, 48\)",
    ),
    "head of another vocabulary": (
        "plain",
        {"tensors": {"lm_head.weight": np.zeros((41, 32), np.float32)}},
        r"lm_head.weight \(41, 32\) instead of \(40, 32\)",
    ),
    "unknown tensor": ("plain", {"tensors": {"extra": np.zeros(3)}}, "not expected: extra"),
    "missing tensor": ("plain", {"lose": {"norm.weight"}}, "missing: norm.weight"),
    "twice the same": (
        "plain",
        {"tensors": {"model.norm.weight": np.ones(32, np.float32)}},
        "model.norm.weight and norm.weight are the same tensor|"
        "norm.weight and model.norm.weight are the same tensor",
    ),
    "lent embedding": (
        "plain",
        {"lose": {"embed_tokens.weight"}},
        "borrows the target's embedding, but its hidden_size is 32 and the target's 24",
    ),
    "lent head": (
        "plain",
        {"lose": {"lm_head.weight"}},
        "borrows the target's head, but its hidden_size is 32 and the target's 24",
    ),
    "lent head, draft vocabulary": (
        "plain",
        {**LENT, "tensors": WIDE_FC, "lose": {"lm_head.weight"}},
        "no lm_head.weight for its draft_vocab_size 40; the target's head has 97 rows",
    ),
    "lent embedding as head": (
        "plain",
        {
            **LENT,
            "tensors": WIDE_FC,
            "lose": {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"},
            "draft_vocab_size": 97,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings is true and no embedding is stored",
    ),
    "map of another size": (
        "plain",
        {"tensors": {"d2t": IDS[:-1]}},
        r"d2t has shape \(39,\) instead of \(40,\)",
    ),
    "marks of another size": (
        "plain",
        {"tensors": {"t2d": np.append(MARKS, True)}},
        r"t2d has shape \(98,\) instead of \(97,\)",
    ),
    "no map": ("plain", {"lose": {"d2t"}}, "no d2t for its 40 draft ids among the target's 97"),
    "map out of range": (
        "plain",
        {"tensors": {"d2t": IDS + 40}},
        "d2t maps 40 draft ids to 40 ids from 4. to 1.., the target's are 0 to 96",
    ),
    "map that repeats": (
        "plain",
        {"tensors": {"d2t": -np.arange(40)}},
        "d2t maps 40 draft ids to 1 ids from 0 to 0",
    ),
    "marks of others": (
        "plain",
        {"tensors": {"t2d": ~MARKS}},
        "t2d marks 57 ids that are not d2t's 40",
    ),
    "multi-layer, another kind": (
        "multi_layer",
        {"architectures": ["LlamaForCausalLMEagle"]},
        "the drafter is eagle, not multi_layer_eagle",
    ),
    "multi-layer, missing key": (
        "multi_layer",
        {"drop": ["chain_hidden_states"]},
        "key 'chain_hidden_states' is missing",
    ),
    "multi-layer, activation": (
        "multi_layer",
        {"hidden_act": "gelu"},
        "hidden_act is 'gelu', only 'silu'",
    ),
    "multi-layer, none": ("multi_layer", {"num_nextn_predict_layers": 0}, "num_layers is 0, below"),
    "multi-layer, width": (
        "multi_layer",
        {"target": target_of("multi_layer", hidden_size=64)},
        "a target whose hidden_size is 32, this target's is 64",
    ),
    "multi-layer, layer count": (
        "multi_layer",
        {"num_nextn_predict_layers": 2},
        r"not expected: .*mtp\.layers\.2\.",
    ),
    "multi-layer, own head": (
        "multi_layer",
        {"tensors": {"lm_head.weight": np.zeros((97, 32), np.float32)}},
        "not expected: lm_head.weight",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_with_both_sides(tmp_path, fault):
    case, changes, message = REFUSED[fault]
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path, case, **changes)


def test_a_layer_reads_its_own_tensors():
    """F31: step i's weights are those that the checkpoint numbers i."""
    _, params = loaded("multi_layer")
    tensors = tensors_of("multi_layer")
    for layer in range(3):
        prefix = f"model.mtp.layers.{layer}."
        np.testing.assert_array_equal(params.mixes[layer], tensors[prefix + "eh_proj.weight"])
        rows = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        np.testing.assert_array_equal(params.layers[layer].qkv, np.concatenate(rows))
    names = ("embed_norms", "hidden_norms", "norms", "input_norms", "q_norms", "layers")
    assert all(len(getattr(params, name)) == 3 for name in names)


def test_configs_are_values():
    config = loaded("plain")[0]
    assert dataclasses.replace(config) == config and hash(config) == hash(loaded("plain")[0])
