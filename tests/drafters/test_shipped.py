"""The drafters that come with the package fit their models, say what was measured, and draft."""

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.drafters.registry import plan_drafter
from jaxspec.drafters.shipped import SHIPPED, shipped_checkpoint
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.hub import DEFAULT_MODEL
from tests.smollm2 import CACHE, REFERENCE, smollm2_checkpoint, smollm2_files

FOLDER = SHIPPED[DEFAULT_MODEL].path
MOST_BYTES = 40_000_000  # of package data, all drafters together


def test_the_default_model_has_one_and_all_are_small():
    files = [file for shipped in SHIPPED.values() for file in shipped.path.iterdir()]
    assert {file.name for file in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


@pytest.mark.parametrize("model", SHIPPED)
def test_its_card_names_the_accept_length_that_auto_counts_with(model):
    shipped = SHIPPED[model]
    assert f"| {shipped.accept_length:.2f} |" in (shipped.path / "README.md").read_text()


def test_it_goes_by_its_name_and_by_its_kind():
    assert shipped_checkpoint("dflash", DEFAULT_MODEL) == FOLDER
    assert shipped_checkpoint("smollm2-135m-dflash", "other") == FOLDER
    assert shipped_checkpoint("dflash", "other") is None
    assert shipped_checkpoint("none", DEFAULT_MODEL) is None


def test_a_kind_that_is_not_shipped_for_the_model_is_no_drafter():
    target = smollm2_checkpoint().config
    with pytest.raises(ModelFileError, match="dflash"):
        plan_drafter(EngineConfig(model="other", drafter="dflash"), target, "float32")


@pytest.mark.network
def test_it_drafts_well_and_changes_no_text():
    """More than a token a step, and the greedy text of transformers but for near ties."""
    smollm2_files()
    reference = REFERENCE["chat_greedy"][:2]
    llm = LLM(
        drafter="dflash",
        max_model_len=128,
        max_num_seqs=2,
        lazy=True,
        compilation_cache=False,
        cache_dir=CACHE,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": entry["prompt_ids"]} for entry in reference],
        SamplingParams(temperature=0.0, max_tokens=24),
    )
    for entry, output in zip(reference, outputs, strict=True):
        written = output.outputs[0].token_ids
        assert written == entry["greedy_ids"][: len(written)]
    accepted = sum(output.metrics.num_accepted for output in outputs)
    verifies = sum(output.metrics.num_verifies for output in outputs)
    assert 1 + accepted / verifies > 1.4
