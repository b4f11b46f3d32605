"""Memory, time, and the choices made from target and data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec.models.config import ModelConfig
from jaxspec.tokenizer import load_tokenizer
from jaxspec.training.config import TrainConfig, TrainingError, resume_command
from jaxspec.training.loss import LossSpec
from jaxspec.training.plan import estimate, fit_to_memory
from jaxspec.training.setup import (
    choose_attention,
    choose_compute_dtype,
    choose_mask_token,
    default_feature_layers,
    drafter_config,
)
from jaxspec.training.spec import StepSpec
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.training.tiny import TARGET, conversation, step_spec

QWEN3_8B = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    qk_norm=True,
)


def big_spec() -> StepSpec:
    config = TrainConfig(num_layers=5, block_size=16)
    return StepSpec(
        target=QWEN3_8B,
        drafter=drafter_config(config, QWEN3_8B, 151669),
        loss=LossSpec(block_size=16),
        num_anchors=512,
        attention="cudnn",
    )


def fitted(spec: StepSpec, gigabytes: float, **changes) -> StepSpec:
    settings = dict(row_len=3072, batch_rows=8, micro_batch=None, platform="gpu")
    return fit_to_memory(spec, free_bytes=int(gigabytes * 1e9), **{**settings, **changes})


def test_a_big_target_is_counted_from_its_sizes():
    """16.4 GB of target weights and 1.06 G drafter parameters at 26 bytes; 2 FLOPs a weight."""
    needs = estimate(big_spec(), row_len=3072, batch_rows=8)
    assert 40e9 < needs.fixed_bytes < 50e9
    assert needs.bytes_at(2) - needs.bytes_at(1) == needs.row_bytes > 5e9
    target_flops = 2 * 6.9e9 * 3072 * 8
    assert target_flops < needs.flops < 6 * target_flops


def test_less_memory_takes_fewer_rows_then_fewer_blocks():
    sizes = [fitted(big_spec(), gigabytes) for gigabytes in (500, 140, 70, 1)]
    assert [spec.micro_batches for spec in sizes] == sorted(spec.micro_batches for spec in sizes)
    assert sizes[0].micro_batches < sizes[1].micro_batches < sizes[3].micro_batches == 8
    assert (sizes[0].chunk, sizes[3].chunk) == (512, 1)
    for spec in sizes[:3]:
        rows = 8 // spec.micro_batches
        assert estimate(spec, row_len=3072, batch_rows=8).bytes_at(rows) < 500e9
    assert fitted(big_spec(), 1, micro_batch=4).micro_batches == 2


def test_logits_of_a_chunk_stay_within_their_share():
    spec = fitted(step_spec(), 1.0, row_len=24, platform="cpu")
    slots = 3 * spec.loss.chunk * TARGET.vocab_size * 10
    assert slots <= 128 << 20
    assert fitted(big_spec(), 140).loss.chunk * 15 * 151936 * 10 <= 3 << 29


@pytest.mark.parametrize(
    ("num_layers", "num_features", "layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 3, (1, 14, 27)),
        (24, 5, (1, 6, 11, 16, 21)),
        (32, 4, (1, 10, 20, 29)),
        (30, 1, (15,)),
        (1, 1, (0,)),
    ],
)
def test_features_come_from_the_layers_that_published_drafters_read(
    num_layers, num_features, layers
):
    assert default_feature_layers(num_layers, num_features) == layers


def test_more_features_than_layers_are_refused():
    with pytest.raises(TrainingError, match="num_features is 5, but a target of 6 layers has 3"):
        default_feature_layers(6, 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("model")), name="tiny")


def choose(tokenizer, used, *, vocab_size=VOCAB_SIZE, asked=None):
    target = dataclasses.replace(TARGET, vocab_size=vocab_size, eos_token_ids=(VOCAB_SIZE - 1,))
    return choose_mask_token(asked, tokenizer, target, [conversation([*used, *used], 1)])


def test_the_mask_is_an_embedding_that_no_text_has(tokenizer):
    """As in Qwen3, whose tokenizer ends at 151668 and whose embedding goes on."""
    token, reason = choose(tokenizer, [5, 6], vocab_size=VOCAB_SIZE + 6)
    assert (token, reason) == (VOCAB_SIZE, "the first embedding that no text has")


def test_the_mask_is_else_a_control_token_that_the_data_never_uses(tokenizer):
    """<|im_start|> here; <|im_end|> ends every answer."""
    token, reason = choose(tokenizer, [5, 6])
    assert token == VOCAB_SIZE - 2
    assert reason == "<|im_start|>, a control token that the data never uses"


def test_a_model_without_a_free_token_is_refused(tokenizer):
    with pytest.raises(TrainingError, match="tiny has no token that the data never uses"):
        choose(tokenizer, [5, VOCAB_SIZE - 2])


def test_dtype_and_attention_follow_the_device():
    assert choose_compute_dtype("auto", "cpu")[0] == "float32"
    assert choose_compute_dtype("auto", "gpu")[0] == "bfloat16"
    assert choose_compute_dtype("float32", "gpu") == ("float32", "asked for")
    assert choose_attention("auto", TARGET, "float32", 8, "cpu") == ("xla", "cudnn needs a GPU")
    assert choose_attention("cudnn", TARGET, "float32", 8, "cpu") == ("cudnn", "asked for")
    # The library itself is asked: on a CPU it says no.
    name, reason = choose_attention("auto", TARGET, "bfloat16", 8, "gpu")
    assert name == "xla"
    assert reason.startswith("cudnn refuses: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"block_size": 1}, "block_size is 1; it must be at least 2"),
        ({"micro_batch": 5}, "micro_batch is 5, which does not divide batch_rows 32"),
        ({"row_len": 100}, "num_anchors is 128, but a row has 100 tokens; lower it"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"max_minutes": -1.0}, "max_minutes is -1.0; it must be above 0"),
        ({"warmup": 1.5}, "warmup is 1.5; it must be from 0 to 1"),
        ({"weight_decay": np.nan}, "weight_decay is nan; it must be at least 0"),
        ({"loss": "flat"}, "loss is 'flat'; it must be one of decay, dpace"),
        ({"attention": "fast"}, "attention is 'fast'; it must be one of auto, xla, cudnn"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(TrainingError, match=message):
        TrainConfig(**changes)


def test_the_command_that_goes_on_repeats_what_was_asked_for():
    config = TrainConfig(data="my data", output="out", num_layers=2, max_minutes=3.5, dry_run=True)
    assert resume_command(config) == (
        "jaxspec train --data 'my data' --output out --num-layers 2 --max-minutes 3.5 --resume"
    )
