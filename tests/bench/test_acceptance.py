"""Accept lengths of finished requests, by hand, and the table of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.bench.acceptance import row_of
from jaxspec.bench.acceptance_plot import draw_acceptance
from jaxspec.bench.prompts import prompt_sets
from jaxspec.config import ConfigError
from jaxspec.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxspec.training.config import TrainingError
from tests.harness import CONTEXT, make_engine, request, run


def finished(token_ids: list[int], accept_lengths: list[int], num_drafts: int = 3):
    metrics = RequestMetrics(
        num_verifies=len(accept_lengths),
        num_draft_tokens=num_drafts * len(accept_lengths),
        accept_lengths=accept_lengths,
    )
    completion = CompletionOutput(0, "", token_ids, FinishReason.STOP)
    return RequestOutput("r", None, (1,), [completion], True, metrics)


LOOP = [1, 2, 3] * 30


def test_tokens_after_the_first_are_counted_and_loops_left_out():
    """8 tokens in 3 steps, of which the last is cut: 7 / 3; 5 in 2: 4 / 2; together 11 / 5."""
    row = row_of(
        "set",
        [
            finished(list(range(8)), [4, 1, 3]),
            finished(list(range(5)), [2, 2]),
            finished(LOOP, [8] * 12),
            finished([9], []),
        ],
    )
    assert (row["prompts"], row["num_prompts"], row["num_looped"]) == ("set", 2, 1)
    assert (row["num_tokens"], row["num_verifies"]) == (11, 5)
    assert row["mean_accept_length"] == 11 / 5
    assert row["median_accept_length"] == (7 / 3 + 2) / 2
    assert row["slots"] == [4 / 5, 2 / 5, 1 / 5]
    assert row["by_position"] == (4 / 5, 1 / 2, 1 / 2)
    assert row["accept_lengths"] == {1: 1, 2: 2, 3: 1, 4: 1}


def test_a_set_of_loops_has_no_length(tmp_path):
    row = row_of("set", [finished(LOOP, [8] * 12), finished([9], [])])
    assert (row["num_prompts"], row["num_looped"]) == (0, 1)
    assert row["mean_accept_length"] is row["median_accept_length"] is None
    draw_acceptance([{**row, "drafter": "d", "temperature": 0.0}], tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").stat().st_size > 0


@pytest.mark.parametrize(("accepts", "slots"), [(7, {1.0}), (0, {0.0})])
def test_an_oracle_drafter_accepts_whole_blocks_and_a_wrong_one_nothing(accepts, slots):
    engine = make_engine("scripted", accepts=accepts)
    outputs = run(engine, *(request(str(i), [3 + i, 4, 5], max_tokens=CONTEXT - 6) for i in (0, 1)))
    assert set(row_of("set", list(outputs.values()))["slots"]) == slots


def test_sets_are_named_by_their_files(tmp_path):
    (tmp_path / "held-out.prompts.jsonl").write_text('{"prompt": "Why?"}\n"How?"\n')
    (tmp_path / "code.txt").write_text("Write a loop.\n")
    files = [str(tmp_path / name) for name in ("held-out.prompts.jsonl", "code.txt")]
    sets = prompt_sets(files)
    assert {name: [prompt.text for prompt in some] for name, some in sets.items()} == {
        "held-out": ["Why?", "How?"],
        "code": ["Write a loop."],
    }
    assert {prompt.kind for prompt in sets["code"]} == {"code"}
    with pytest.raises(TrainingError, match="cannot be read as prompts"):
        prompt_sets([str(tmp_path / "missing.txt")])


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    for name in ("no/folder/plot.png", "plot.docx"):
        with pytest.raises(ConfigError, match="which cannot be written"):
            draw_acceptance([], tmp_path / name)


def test_the_committed_held_out_prompts_can_be_read():
    file = Path(__file__).parents[2] / "benchmarks" / "drafter" / "held-out.prompts.jsonl"
    (prompts,) = prompt_sets([str(file)]).values()
    assert len(prompts) == 256
    assert {prompt.kind for prompt in prompts} == {"held-out"}
