"""From prompts to a served drafter, on a random model of a few thousand parameters."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import assemble, open_model
from jaxspec.request import Request, SamplingParams
from jaxspec.training import loop
from jaxspec.training.anchors import TokenRows
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.config import DataConfig, TrainConfig, TrainingError
from jaxspec.training.conversations import HELD_OUT, TRAIN, load_conversations, parts
from jaxspec.training.data import make_data, read_texts
from jaxspec.training.loss import LossSpec
from jaxspec.training.report import read_metrics
from jaxspec.training.rows import pack_rows
from jaxspec.training.spec import StepSpec
from jaxspec.training.target import build_dense_forward
from jaxspec.training.train import train
from jaxspec.training.walk import build_walk
from jaxspec.weights.load import load_dflash, load_target
from tests.tiny_model import write_tiny_model

BLOCK = 4
MASK = 200  # a byte that no text here holds
SHORT = 6  # steps of the runs that are cut and resumed


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, prompts and the data made from them in two sittings."""
    return make_home(tmp_path_factory.mktemp("training"), sittings=(40, 72), num_repeated=5)


def make_home(home, *, sittings=(72,), num_repeated=0):
    write_tiny_model(home / "model")
    prompts = [f"{letter}{other} tell me" for letter in "abcdefgh" for other in "qrstuvwxyz"]
    (home / "prompts.txt").write_text("\n".join(prompts + prompts[:num_repeated]))
    for num_prompts in sittings:
        make_data(data_config(home, num_prompts=num_prompts), cache_dir=home)
    return home


def data_config(home, **changes) -> DataConfig:
    settings = dict(
        output=str(home / "data"),
        model=str(home / "model"),
        prompts=str(home / "prompts.txt"),
        num_held_out=8,
        max_tokens=20,
        max_prompt_tokens=16,
        max_num_seqs=1,
        part_size=32,
        sampled_share=0.0,
        followup_share=0.0,
    )
    return DataConfig(**{**settings, **changes})


def small_run(home, output):
    """Settings that a run of any recipe has."""
    return dict(
        data=str(home / "data"),
        output=str(home / output),
        model=str(home / "model"),
        num_features=1,
        block_size=BLOCK,
        row_len=64,
        batch_rows=8,
        num_anchors=16,
        max_steps=SHORT,
        measure_every=4,
    )


def train_config(home, output, **changes) -> TrainConfig:
    own = dict(num_layers=2, mask_token_id=MASK, learning_rate=3e-3)
    return TrainConfig(**{**small_run(home, output), **own, **changes})


@pytest.fixture(scope="module")
def trained(home):
    """A drafter that has seen 64 conversations many times."""
    by_heart = dict(loss="decay", soft_labels=0.0)  # what it read, not what the target thought of
    config = train_config(home, "overfit", max_steps=400, measure_every=200, **by_heart)
    return train(config, cache_dir=home)


def serve(home, drafter, kind=TRAIN):
    """(engine, finished outputs) of the prompts of a kind, greedily."""
    assembled = assemble(
        EngineConfig(
            model=str(home / "model"),
            drafter=str(drafter),
            max_num_seqs=1,
            max_model_len=96,
            overlap=False,
        ),
        cache_dir=home,
    )
    engine, tokenizer = assembled.engine, assembled.tokenizer
    for text in read_texts(home / "data", kind):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams(temperature=0.0, max_tokens=20)
        engine.add_request(Request(text, tuple(ids), params))
    outputs = {}
    while engine.has_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
    return engine, outputs


def test_overfitting_reaches_the_block_size_in_serving(home, trained):
    """And the text served with the drafter is what the target wrote without it."""
    engine, outputs = serve(home, trained.folder)
    stats = engine.stats
    assert 1 + stats.num_accepted / stats.num_verifies > 0.85 * BLOCK
    conversations = load_conversations(home / "data", TRAIN)
    same = [
        outputs[text].outputs[0].token_ids[: c.supervised.sum()]
        == c.token_ids[c.supervised].tolist()
        for text, c in zip(read_texts(home / "data", TRAIN), conversations, strict=True)
    ]
    assert np.mean(same) > 0.9  # near ties may fall the other way in another batch shape


def test_the_walk_over_held_out_text_is_what_serving_yields(home, trained):
    """Step for step, with the weights as they were written out."""
    engine, outputs = serve(home, trained.folder, HELD_OUT)
    rows = pack_rows(load_conversations(home / "data", HELD_OUT), 64, seed=0)
    opened = open_model(EngineConfig(model=str(home / "model")), cache_dir=home)
    drafter, params = load_dflash(trained.folder, opened.checkpoint.config, "float32")
    spec = StepSpec(
        target=opened.checkpoint.config,
        drafter=drafter,
        loss=LossSpec(block_size=BLOCK),
        num_anchors=24,  # does not divide a row
        compute_dtype="float32",
    )
    walked = build_walk(spec, load_target(opened.checkpoint, "float32"), rows)(params)
    lengths = [len(output.outputs[0].token_ids) for output in outputs.values()]
    assert sum(lengths) == rows.supervised.sum()
    assert walked["simulated_accept_length"] == (sum(lengths) - 8) / engine.stats.num_verifies


def test_data_is_what_the_target_says_greedily(home):
    opened = open_model(EngineConfig(model=str(home / "model")), cache_dir=home)
    target = load_target(opened.checkpoint, "float32")
    conversations = load_conversations(home / "data", TRAIN)
    assert len(conversations) == 64
    rows = pack_rows(conversations, 64, seed=0)
    config = opened.checkpoint.config
    dense = build_dense_forward(config, feature_layers=(0,), with_hidden=True)
    hidden = jax.jit(dense)(target, TokenRows.from_host(rows)).hidden
    best = np.asarray(jnp.argmax(jnp.einsum("rse,ve->rsv", hidden, target.head), -1))
    written = rows.supervised[:, 1:]
    assert written.sum() == sum(c.supervised.sum() for c in conversations)
    assert (best[:, :-1] == rows.token_ids[:, 1:])[written].mean() > 0.99


def test_a_second_sitting_adds_parts_and_no_prompt_comes_twice(home):
    assert [path.name for path in parts(home / "data", TRAIN)] == [
        "train-00000.npz",
        "train-00001.npz",
    ]
    texts = read_texts(home / "data", TRAIN) + read_texts(home / "data", HELD_OUT)
    assert len(texts) == len(set(texts)) == 72
    assert len(load_conversations(home / "data", HELD_OUT)) == 8
    counts = json.loads((home / "data" / "meta.json").read_text())["counts"]
    assert counts["conversations"] == 64


def test_a_resumed_run_equals_one_that_was_not_cut(home, monkeypatch):
    whole = train(train_config(home, "whole", ema=0.5), cache_dir=home)
    cut = train_config(home, "cut", ema=0.5)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            train(cut, cache_dir=home)
    assert "4 steps" in (home / "cut" / "README.md").read_text()  # what it had by then
    resumed = train(dataclasses.replace(cut, resume=True), cache_dir=home)
    assert (resumed.steps, resumed.held_out) == (whole.steps, whole.held_out)
    for name in ("model.safetensors", "config.json"):
        assert (home / "cut" / name).read_bytes() == (home / "whole" / name).read_bytes()
    steps = [entry["step"] for entry in read_metrics(home / "cut" / "metrics.jsonl")]
    assert steps == [4, 6]


def test_the_best_measured_drafter_is_kept(home, monkeypatch):
    """Small data is learnt by heart in the end: measured 1.5, 2.5, 2.0 at steps 2, 4 and 6."""
    lengths = iter([1.5, 2.5, 2.0])
    seen = []

    def measurement(*args):
        def measure(params):
            seen.append(np.asarray(params.fc))
            return {"loss": 1.0, "slot_accuracy": [0.5], "simulated_accept_length": next(lengths)}

        return measure

    monkeypatch.setattr(loop, "build_walk", measurement)
    result = train(train_config(home, "best", measure_every=2), cache_dir=home)
    assert (result.steps, result.held_out["simulated_accept_length"]) == (4, 2.5)
    target = open_model(EngineConfig(model=str(home / "model")), cache_dir=home).checkpoint.config
    _, params = load_dflash(result.folder, target, "float32")
    np.testing.assert_allclose(params.fc, seen[1], rtol=0.01, atol=1e-6)
    assert np.abs(params.fc - seen[2]).max() > 0.02 * np.abs(seen[2]).max()


def interrupt_at(patch, step):
    """Ctrl-C while the batch of a step is put together."""
    original = loop.batch_indices

    def batch_indices(at, *args, **kwargs):
        if at == step:
            raise KeyboardInterrupt
        return original(at, *args, **kwargs)

    patch.setattr(loop, "batch_indices", batch_indices)


def test_a_run_is_not_overwritten_or_resumed_with_other_settings(home):
    config = train_config(home, "settings", max_steps=2)
    train(config, cache_dir=home)
    with pytest.raises(TrainingError, match="holds a run of 2 steps; go on with --resume"):
        train(config, cache_dir=home)
    other = dataclasses.replace(config, resume=True, learning_rate=0.1)
    with pytest.raises(
        TrainingError, match=r"learning_rate is 0.1, but the run to resume has 0.003"
    ):
        train(other, cache_dir=home)


def test_there_must_be_a_checkpoint_to_resume_from(home):
    with pytest.raises(TrainingError, match="holds no checkpoint to resume from"):
        train(train_config(home, "nothing", resume=True), cache_dir=home)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(home, monkeypatch):
    config = train_config(home, "full", save_minutes=1e-9)  # after every step
    usage = shutil.disk_usage(home)
    calls = iter(range(100))

    def disk_usage(path):
        return usage._replace(free=usage.free if next(calls) < 3 else 1000)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", disk_usage)
        with pytest.raises(
            TrainingError, match=r"checkpoint 4 could not be written.*checkpoint 3 is intact"
        ):
            train(config, cache_dir=home)
    checkpoints = Checkpoints(home / "full" / "checkpoints")
    assert checkpoints.last_step == 3
    checkpoints.close()
    assert sorted(path.name for path in (home / "full" / "checkpoints").iterdir()) == ["2", "3"]
    resumed = train(dataclasses.replace(config, resume=True), cache_dir=home)
    assert resumed.steps == SHORT


def test_the_run_leaves_a_card_metrics_and_a_plot(trained):
    card = (trained.folder / "README.md").read_text()
    assert "# overfit" in card
    assert "400 steps" in card
    assert "counts: {'conversations': 64" in card
    assert (trained.folder / "metrics.png").stat().st_size > 10_000
    entries = read_metrics(trained.folder / "metrics.jsonl")
    assert [e["step"] for e in entries if e["kind"] == "held-out"] == [200, 400]
    last = entries[-1]
    assert last["simulated_accept_length"] == trained.held_out["simulated_accept_length"]
    assert len(last["slot_accuracy"]) == BLOCK - 1


def test_a_dry_run_prints_its_estimates_and_writes_nothing(home, capsys):
    config = train_config(home, "dry", dry_run=True)
    assert train(config, cache_dir=home) is None
    shown = capsys.readouterr().err
    assert "memory: " in shown
    assert "GB (estimated)" in shown
    assert "minutes (estimated" in shown
    assert not (home / "dry").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "--data is missing"),
        ({"output": None}, "--output is missing"),
        ({"data": "/nowhere"}, "/nowhere is no training data: it has no meta.json"),
        ({"mask_token_id": None}, "has no token that the data never uses"),
        ({"mask_token_id": 258}, "mask_token_id is 258; the target's vocabulary is 0 to 257"),
        ({"mask_token_id": 0}, r"mask_token_id is 0 \('!'\), which the data holds"),
        ({"num_features": 2}, "num_features is 2, but a target of 1 layers"),
    ],
)
def test_what_cannot_be_trained_is_refused(home, changes, message):
    with pytest.raises(TrainingError, match=message):
        train(dataclasses.replace(train_config(home, "refused"), **changes), cache_dir=home)


def test_data_of_another_vocabulary_is_refused(home, tmp_path):
    shutil.copytree(home / "data", tmp_path / "data")
    meta = tmp_path / "data" / "meta.json"
    meta.write_text(meta.read_text().replace('"vocab_size": 258', '"vocab_size": 300'))
    with pytest.raises(TrainingError, match="vocabulary has 300 tokens; the target's has 258"):
        train(train_config(home, "refused", data=str(tmp_path / "data")), cache_dir=home)
    meta.write_text("{}")
    with pytest.raises(TrainingError, match=r"meta.json cannot be read"):
        train(train_config(home, "refused", data=str(tmp_path / "data")), cache_dir=home)


def test_a_damaged_part_is_named(home, tmp_path):
    shutil.copytree(home / "data", tmp_path / "data")
    part = tmp_path / "data" / "train-00001.npz"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"train-00001.npz cannot be read"):
        load_conversations(tmp_path / "data", TRAIN)
    for path in parts(tmp_path / "data", TRAIN):
        path.unlink()
    with pytest.raises(TrainingError, match="holds no conversations"):
        train(train_config(home, "refused", data=str(tmp_path / "data")), cache_dir=home)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": None}, "--output is missing"),
        ({"num_held_out": 80, "num_prompts": 90}, "holds 80 different prompts"),
        ({"model": "/elsewhere"}, "holds data of .*, not /elsewhere"),
    ],
)
def test_what_no_data_can_be_made_of_is_refused(home, changes, message):
    with pytest.raises(TrainingError, match=message):
        make_data(data_config(home, **changes), cache_dir=home)


def test_a_run_may_start_from_a_drafter(home, trained):
    """At step 0 it is that drafter, whatever scale its features are trained in now."""
    begun = train_config(
        home, "begun", init_from=str(trained.folder), learning_rate=1e-12, max_steps=1, seed=5
    )
    result = train(begun, cache_dir=home)
    target = open_model(EngineConfig(model=str(home / "model")), cache_dir=home).checkpoint.config
    _, before = load_dflash(trained.folder, target, "float32")
    _, after = load_dflash(result.folder, target, "float32")
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(new, old, rtol=0.01, atol=1e-6)
    assert result.held_out["simulated_accept_length"] == pytest.approx(
        trained.held_out["simulated_accept_length"], abs=0.05
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 1}, "has num_layers 2, and this run 1; set num_layers to the drafter's"),
        ({"mask_token_id": 201}, "has mask_token_id 200, and this run 201"),
    ],
)
def test_a_drafter_of_another_shape_is_not_gone_on_from(home, trained, changes, message):
    config = train_config(home, "other", init_from=str(trained.folder), **changes)
    with pytest.raises(TrainingError, match=message):
        train(config, cache_dir=home)
