"""From data to a served EAGLE-3 head, on a random model of a few thousand parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec import cli
from jaxspec.config import EngineConfig
from jaxspec.drafters.eagle_checkpoint import load_eagle
from jaxspec.engine.assemble import assemble, open_model
from jaxspec.request import Request, SamplingParams
from jaxspec.training import train as module
from jaxspec.training.config import Eagle3TrainConfig, TrainingError, resume_command
from jaxspec.training.conversations import HELD_OUT, TRAIN, load_conversations
from jaxspec.training.data import read_texts
from jaxspec.training.eagle import EagleTarget
from jaxspec.training.loss import LossSpec
from jaxspec.training.rows import pack_rows
from jaxspec.training.setup import choose_draft_vocabulary
from jaxspec.training.spec import StepSpec
from jaxspec.training.train import train
from jaxspec.training.walk import build_walk
from jaxspec.weights.load import load_target
from jaxspec.weights.safetensors import open_safetensors
from tests.tiny_model import VOCAB_SIZE
from tests.training.test_pipeline import BLOCK, interrupt_at, make_home, small_run
from tests.training.tiny import TARGET, conversation

pytestmark = pytest.mark.nightly  # the same loop and checkpoints as DFlash's, in test_pipeline

DRAFT_VOCAB = 150


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("eagle"))


def train_config(home, output, **changes) -> Eagle3TrainConfig:
    own = dict(draft_vocab_size=DRAFT_VOCAB, learning_rate=5e-3)
    return Eagle3TrainConfig(**{**small_run(home, output), **own, **changes})


@pytest.fixture(scope="module")
def trained(home):
    """A head that has seen 64 conversations many times."""
    return train(train_config(home, "overfit", max_steps=400, measure_every=200), cache_dir=home)


@pytest.fixture(scope="module")
def whole(home):
    """A few steps without an interruption."""
    return train(train_config(home, "whole"), cache_dir=home)


def serve(home, drafter, kind=TRAIN, **options):
    """(engine, finished outputs) of the prompts of a kind, greedily."""
    config = EngineConfig(
        model=str(home / "model"),
        drafter=str(drafter),
        max_num_seqs=1,
        max_model_len=96,
        overlap=False,
        adaptive=False,
        block_size=BLOCK,
        **options,
    )
    assembled = assemble(config, cache_dir=home)
    engine, tokenizer = assembled.engine, assembled.tokenizer
    for text in read_texts(home / "data", kind):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams(temperature=0.0, max_tokens=20)
        engine.add_request(Request(text, tuple(ids), params))
    outputs = {}
    while engine.has_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
    return engine, outputs


def accept_length(engine) -> float:
    return 1 + engine.stats.num_accepted / engine.stats.num_verifies


@pytest.mark.nightly
def test_overfitting_raises_the_accept_length_of_chains_and_trees(home, trained):
    """And the text served with the head is what the target wrote without it."""
    untrained = train(train_config(home, "untrained", max_steps=1), cache_dir=home)
    before = accept_length(serve(home, untrained.folder)[0])
    chain, outputs = serve(home, trained.folder)
    tree, tree_outputs = serve(home, trained.folder, tree_nodes=12, tree_topk=3)
    assert before < 2.0 and 0.7 * BLOCK < accept_length(chain) <= accept_length(tree)
    conversations = load_conversations(home / "data", TRAIN)
    for served in (outputs, tree_outputs):
        same = [
            served[text].outputs[0].token_ids[: c.supervised.sum()]
            == c.token_ids[c.supervised].tolist()
            for text, c in zip(read_texts(home / "data", TRAIN), conversations, strict=True)
        ]
        assert np.mean(same) > 0.9  # near ties may fall the other way in another batch shape


@pytest.mark.nightly
def test_the_walk_over_held_out_text_is_what_serving_yields(home, trained):
    """Step for step, with the weights as they were written out."""
    engine, outputs = serve(home, trained.folder, HELD_OUT)
    rows = pack_rows(load_conversations(home / "data", HELD_OUT), 64, seed=0)
    opened = open_model(EngineConfig(model=str(home / "model")), cache_dir=home)
    drafter, params = load_eagle(trained.folder, opened.checkpoint.config, "float32")
    spec = StepSpec(
        target=opened.checkpoint.config,
        drafter=drafter,
        loss=LossSpec(block_size=BLOCK),
        num_anchors=24,  # does not divide a row
        compute_dtype="float32",
    )
    frozen = EagleTarget(load_target(opened.checkpoint, "float32"), params.target_ids)
    walked = build_walk(spec, frozen, rows)(params.replace(target_ids=None))
    lengths = [len(output.outputs[0].token_ids) for output in outputs.values()]
    assert sum(lengths) == rows.supervised.sum()
    served = (sum(lengths) - len(lengths)) / engine.stats.num_verifies
    # The walk goes on along the text; a served chain along its own drafts, which are the text as
    # far as they count.
    assert walked["simulated_accept_length"] == served


def test_the_checkpoint_is_laid_out_as_public_engines_load_it(whole):
    tensors = open_safetensors([whole.folder / "model.safetensors"])
    layer = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    layer += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "hidden_norm", "input_layernorm")
    names = {f"midlayer.{name}.weight" for name in (*layer, "post_attention_layernorm")}
    assert set(tensors) == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    offsets, marks = tensors["d2t"].read(), tensors["t2d"].read()
    assert (offsets.dtype, marks.dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(offsets + np.arange(DRAFT_VOCAB), np.flatnonzero(marks))
    assert len(marks) == VOCAB_SIZE
    card = (whole.folder / "README.md").read_text()
    assert "An EAGLE-3 head for" in card
    assert f"| drafts from | {DRAFT_VOCAB} of the target's {VOCAB_SIZE} tokens |" in card


@pytest.mark.nightly
def test_a_resumed_run_equals_one_that_was_not_cut(home, whole, monkeypatch):
    cut = train_config(home, "cut")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            train(cut, cache_dir=home)
    resumed = train(dataclasses.replace(cut, resume=True), cache_dir=home)
    assert (resumed.steps, resumed.held_out) == (whole.steps, whole.held_out)
    for name in ("model.safetensors", "config.json"):
        assert (home / "cut" / name).read_bytes() == (home / "whole" / name).read_bytes()


def test_the_vocabulary_is_what_answers_hold_most():
    conversations = [conversation([9, 9, 9, 4, 5, 5, 7], 3), conversation([1, 1, 5, 4, 4], 2)]
    assert choose_draft_vocabulary(2, TARGET, conversations).tolist() == [4, 5]
    assert choose_draft_vocabulary(4, TARGET, conversations).tolist() == [0, 4, 5, 7]
    assert len(choose_draft_vocabulary(None, TARGET, conversations)) == TARGET.vocab_size
    with pytest.raises(TrainingError, match=r"draft_vocab_size is 49, but .* has 48 tokens"):
        choose_draft_vocabulary(49, TARGET, conversations)


def test_settings_out_of_range_are_refused():
    with pytest.raises(TrainingError, match="draft_vocab_size is 0; it must be at least 1"):
        Eagle3TrainConfig(draft_vocab_size=0)
    with pytest.raises(TrainingError, match="block_size is 1; it must be at least 2"):
        Eagle3TrainConfig(block_size=1)


def test_the_command_line_names_the_kind_of_drafter(home, capsys, monkeypatch):
    config = train_config(home, "dry")
    words = resume_command(config).split()
    assert words[:3] == ["jaxspec", "train", "eagle3"] and words[-1] == "--resume"
    monkeypatch.setattr(module, "measure_flops_per_s", lambda *args: 1e9)
    arguments = [*words[1:-1], "--dry-run", "--no-compilation-cache"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().err
    assert "drafter: EAGLE-3, unrolled for 3 drafts (reads target layers (0,))" in shown
    assert f"draft vocabulary: {DRAFT_VOCAB} of {VOCAB_SIZE} tokens" in shown
