"""Parts of training data, with a target whose every word is scripted."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.tokenizer import load_tokenizer
from jaxspec.training import maker as module
from jaxspec.training.config import DataConfig
from jaxspec.training.conversations import HELD_OUT, TRAIN
from jaxspec.training.filters import SharedText
from jaxspec.training.generate import Completed
from jaxspec.training.maker import Counts, Maker, answer, draw_prompts
from jaxspec.training.prompts import TASKS, chat_frame
from jaxspec.weights.files import no_progress
from tests.tiny_model import EOS, write_tiny_model

TOPICS = [f"topic {letter}{other}" for letter in "abcdefgh" for other in "abcdefgh"]
HEADER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("model")), name="tiny")


@pytest.fixture
def make(tokenizer):
    def make(**changes) -> Maker:
        settings = dict(num_prompts=40, max_prompt_tokens=60, followup_share=0.0)
        return Maker(
            config=DataConfig(**{**settings, "num_held_out": 4, **changes}),
            engine=None,
            model=None,
            tokenizer=tokenizer,
            frame=chat_frame(tokenizer),
            topics=TOPICS,
            given=None,
            counts=Counts(),
            seen=set(),
            progress=no_progress,
        )

    return make


@pytest.fixture
def script(monkeypatch, tokenizer):
    """Lets the target answer by rule; collects what it was asked."""
    asked = []

    def install(reply, turns=None):
        def complete(engine, wanted, **_):
            asked.extend(wanted)
            return [reply(tokenizer.decode(each.prompt_ids)) for each in wanted]

        monkeypatch.setattr(module, "complete", complete)
        if turns is not None:
            monkeypatch.setattr(module, "write_user_turns", turns)
        return asked

    return install


def says(tokenizer, text, *, ended=True):
    ids = tokenizer.encode(text)
    return Completed([*ids, EOS] if ended else ids, ended)


def test_prompts_are_drawn_until_there_are_enough_new_ones(make, script):
    """Turns come out empty, twice or too long; 3 draws of what is left give 9."""
    draws = []

    def turns(engine, tokenizer, starts, **_):
        draws.append(len(starts))
        number = len(draws)
        return ["", "same", "x" * 61, *(f"turn {number} {i}" for i in range(3))]

    script(None, turns)
    maker = make()
    prompts = draw_prompts(maker, TRAIN, 0, 9)
    assert prompts == [
        "same",
        *(f"turn {n} {i}" for n in (1, 2) for i in range(3)),
        "turn 3 0",
        "turn 3 1",
    ]
    assert maker.counts.repeated_prompts == 5  # "" three times, "same" twice
    assert draws == [int(9 * 1.25) + 8, int(5 * 1.25) + 8, int(2 * 1.25) + 8]


def test_prompts_that_held_out_ones_hold_are_left_out(make, script):
    script(None, lambda *_, **__: ["what is tea?", "of 13 shared letters", "fine"])
    maker = make()
    text = "another of 13 shared letters"
    maker.shared = SharedText([("What is tea", []), (text, maker.tokenizer.encode(text))])
    assert draw_prompts(maker, TRAIN, 0, 1) == ["fine"]
    assert maker.counts.shared_with_held_out == 2


def test_given_prompts_are_split_and_come_once(make):
    maker = make()
    maker.given = [f"prompt {i}" for i in range(10)]
    assert draw_prompts(maker, HELD_OUT, 0, 4) == maker.given[:4]
    assert draw_prompts(maker, TRAIN, 0, 4) == maker.given[4:8]
    assert draw_prompts(maker, TRAIN, 1, 4) == maker.given[8:]
    assert draw_prompts(maker, TRAIN, 2, 4) == []


def test_answers_are_supervised_and_prompts_are_not(make, script, tokenizer):
    script(lambda prompt: says(tokenizer, "yes, indeed"))
    (conversation,), texts = answer(make(), TRAIN, 0, ["is it so?"])
    assert texts == ["is it so?"]
    ids = conversation.token_ids
    prompt = tokenizer.encode_chat([{"role": "user", "content": "is it so?"}])
    assert ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(ids[conversation.supervised], skip_special_tokens=False) == (
        "yes, indeed<|im_end|>"
    )
    assert not conversation.supervised[: len(prompt)].any()


def test_a_loop_is_cut_off_where_it_begins(make, script, tokenizer):
    fresh = "".join(chr(ord("!") + i) for i in range(40))
    script(lambda prompt: says(tokenizer, fresh + "ab" * 40, ended=False))
    maker = make()
    (conversation,), _ = answer(maker, TRAIN, 0, ["go on"])
    assert tokenizer.decode(conversation.token_ids[conversation.supervised]) == fresh + "ab"
    assert maker.counts.answers_cut_at_loops == 1


def test_held_out_answers_are_greedy_and_a_share_of_the_others_is_not(make, script, tokenizer):
    asked = script(lambda prompt: says(tokenizer, "yes"))
    prompts = [f"prompt {i}" for i in range(40)]
    answer(make(sampled_share=0.5, followup_share=1.0), HELD_OUT, 0, prompts)
    assert [each.params.greedy for each in asked] == [True] * 40
    answer(make(sampled_share=0.5), TRAIN, 0, prompts)
    assert 10 < sum(each.params.greedy for each in asked[40:]) < 30


def test_answers_that_held_out_prompts_hold_are_left_out(make, script, tokenizer):
    script(lambda prompt: says(tokenizer, "as they say: thirteen letters or more"))
    maker = make()
    maker.shared = SharedText([("held", tokenizer.encode("thirteen letters or more"))])
    conversations, _ = answer(maker, TRAIN, 0, ["say"])
    assert conversations == []
    assert maker.counts.shared_with_held_out == 1


def test_some_chats_go_on_and_some_answers_become_a_text_at_hand(make, script, tokenizer):
    asked = script(
        lambda prompt: says(tokenizer, f"answer to {prompt[-40:-30]}"),
        lambda engine, tokenizer, starts, **_: [
            f"and then {i}?" if i else "" for i in range(len(starts))
        ],
    )
    maker = make(followup_share=1.0, max_tokens=400)
    conversations, texts = answer(maker, TRAIN, 0, [f"prompt {i}" for i in range(8)])
    assert len(texts) == 8
    assert len(conversations) == 8 + 3 + 4  # one imagined turn came to nothing
    prompts = [tokenizer.decode(each.prompt_ids, skip_special_tokens=False) for each in asked[8:]]
    assert all(p.count("<|im_start|>user") == 2 and p.endswith(HEADER) for p in prompts[:3])
    assert "answer to" in prompts[0].split("and then 1?")[0]
    tasks = {task.split("{text}")[0] for task in TASKS}
    for prompt in prompts[3:]:
        said = prompt.removeprefix("<|im_start|>user\n")
        assert any(said.startswith(task) for task in tasks)
        assert "answer to" in said


def test_an_unfinished_or_empty_answer_is_not_followed_up(make, script, tokenizer):
    def reply(prompt):
        return says(tokenizer, "  " if "one" in prompt else "on and on", ended="one" in prompt)

    asked = script(reply, lambda *_, **__: [])
    conversations, _ = answer(make(followup_share=1.0), TRAIN, 0, ["one", "two"])
    assert len(asked) == len(conversations) == 2
    assert all(np.asarray(c.supervised).sum() > 1 for c in conversations)
