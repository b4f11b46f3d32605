"""What goes wrong on disk and what is left: whole files, and a sentence that says what to do."""

from __future__ import annotations

import builtins
import errno
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training import command, conversations, export
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.config import DataConfig, TrainConfig, TrainingError
from jaxspec.training.conversations import (
    TRAIN,
    load_conversations,
    save_meta,
    save_part,
)
from jaxspec.training.export import export_drafter
from jaxspec.training.report import Report, read_metrics, trim_metrics
from jaxspec.training.step import init_train_state
from tests.training.tiny import SHALLOW, TARGET, conversation, drafter_params, step_spec

FULL = OSError(errno.ENOSPC, "No space left on device")
METRICS = {"loss": 1.0, "slot_accuracy": [0.5], "simulated_accept_length": 1.5}


def fail(*args, **kwargs):
    raise FULL


def small_state(step: int):
    state = init_train_state(step_spec(), drafter_params(SHALLOW), jnp.ones((64,), jnp.float32))
    return state.replace(step=jnp.asarray(step, jnp.int32))


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(3), {"a": 1})
    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(
        TrainingError, match=r"checkpoint 5 could not be written.*No space.*checkpoint 3 is intact"
    ):
        checkpoints.save(small_state(5), {"a": 2})
    saved = checkpoints.restore(small_state(0))
    assert (int(saved.state.step), saved.notes) == (3, {"a": 1})
    checkpoints.close()


def test_the_first_checkpoint_that_cannot_be_written_says_that_there_is_none(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(TrainingError, match="no checkpoint had been written"):
        checkpoints.save(small_state(5), {})
    checkpoints.close()


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(3), {"a": 1})
    checkpoints.close()
    for path in (tmp_path / "3" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TrainingError, match=r"checkpoint 3 in .* cannot be read"):
        checkpoints.restore(small_state(0))
    checkpoints.close()


def test_a_folder_that_cannot_hold_checkpoints_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"cannot hold checkpoints .* choose another output"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_part_on_a_full_disk_leaves_no_half(tmp_path, monkeypatch):
    some = [conversation([1, 2, 3, 4], 2)]
    save_part(tmp_path, TRAIN, 0, some)
    monkeypatch.setattr(conversations.np, "savez_compressed", fail)
    with pytest.raises(TrainingError, match=r"train-00001.npz could not be written .No space left"):
        save_part(tmp_path, TRAIN, 1, some)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-00000.npz"]
    loaded = load_conversations(tmp_path, TRAIN)
    assert loaded[0].token_ids.tolist() == [1, 2, 3, 4]
    assert loaded[0].supervised.tolist() == [False, False, True, True]


def test_tokens_of_large_vocabularies_and_empty_parts_are_kept(tmp_path):
    save_part(tmp_path, TRAIN, 0, [conversation([1, 151_000, 3], 1)])
    save_part(tmp_path, TRAIN, 1, [])
    assert [c.token_ids.tolist() for c in load_conversations(tmp_path, TRAIN)] == [[1, 151_000, 3]]


def test_a_part_whose_lengths_do_not_add_up_is_refused(tmp_path):
    np.savez(
        tmp_path / "train-00000.npz",
        token_ids=np.arange(5, dtype=np.uint16),
        lengths=np.array([2, 2], np.int32),
        supervised=np.packbits(np.ones(5, bool)),
    )
    with pytest.raises(TrainingError, match="holds 5 tokens, not the sum of its lengths"):
        load_conversations(tmp_path, TRAIN)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"meta.json could not be written"):
        save_meta(tmp_path / "file" / "data", {})


def test_an_export_on_a_full_disk_keeps_the_drafter_before(tmp_path, monkeypatch):
    def write(seed):
        export_drafter(tmp_path, drafter_params(SHALLOW, seed), SHALLOW, TARGET, card="card")

    write(1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["README.md", "config.json", "model.safetensors"]
    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(TrainingError, match=r"the drafter cannot be written .*No space left"):
        write(2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_metrics_on_a_full_disk_are_an_error(tmp_path, monkeypatch):
    report = Report(tmp_path / "metrics.jsonl")
    report.add("train", 1, METRICS, total=2)
    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(TrainingError, match=r"metrics.jsonl could not be written .No space left"):
        report.add("train", 2, METRICS, total=2)
    report.close()


def test_metrics_cut_off_in_a_line_are_read_and_trimmed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 20}\n{"kind": "train", "step": 40}\n{"kind": "tr')
    assert [entry["step"] for entry in read_metrics(path)] == [20, 40]
    trim_metrics(path, 20)
    assert path.read_text() == '{"kind": "train", "step": 20}\n'


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_optax(name, *args, **kwargs):
        if name == "jaxspec.training.train":
            raise ModuleNotFoundError("No module named 'optax'", name="optax")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_optax)
    with pytest.raises(TrainingError, match=r"training needs optax.*pip install -e '\.\[train\]'"):
        command._train(TrainConfig(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0; it must be at least 1"),
        ({"num_held_out": -1}, "num_held_out is -1; it must be at least 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"sampled_share": 1.1}, "sampled_share is 1.1; it must be from 0 to 1"),
        ({"max_minutes": 0.0}, "max_minutes is 0.0; it must be above 0"),
        ({"num_prompts": 256}, "num_held_out is 256, which leaves nothing of num_prompts 256"),
    ],
)
def test_data_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(TrainingError, match=message):
        DataConfig(**changes)
