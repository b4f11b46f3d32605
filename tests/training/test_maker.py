"""Conversations in the making, with a target whose every word is scripted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.tokenizer import load_tokenizer
from jaxspec.training.bulk import Completed
from jaxspec.training.config import DataConfig
from jaxspec.training.conversations import HELD_OUT, TRAIN
from jaxspec.training.filters import SharedText
from jaxspec.training.maker import Counts, Maker, Part, make_parts
from jaxspec.training.prompts import TASKS, chat_frame
from jaxspec.weights.files import no_progress
from tests.tiny_model import EOS, write_tiny_model

TOPICS = [f"topic {letter}{other}" for letter in "abcdefgh" for other in "abcdefgh"]
HEADER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("model")), name="tiny")


class ScriptedBulk:
    """Completes what it is given by rule, two at a time; keeps what it was asked.

    reply: prompt's text -> (text, ended).
    """

    def __init__(self, tokenizer, reply):
        self.geometry = SimpleNamespace(num_slots=2, max_model_len=1000)
        self.asked, self._reply, self._tokenizer, self._queue = [], reply, tokenizer, []

    def add(self, wanted):
        self.asked.append(wanted)
        self._queue.append(wanted)

    @property
    def num_waiting(self):
        return len(self._queue)

    @property
    def has_unfinished(self):
        return bool(self._queue)

    def drop_waiting(self):
        self._queue.clear()

    def step(self):
        now, self._queue = self._queue[:2], self._queue[2:]
        return [self._completed(wanted) for wanted in now]

    def _completed(self, wanted):
        prompt = self._tokenizer.decode(wanted.prompt_ids, skip_special_tokens=False)
        text, ended = self._reply(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Completed(wanted, np.array([*ids, EOS] if ended else ids, np.int32), ended)


@pytest.fixture
def make(tokenizer):
    def make(answer=lambda prompt: ("yes, indeed", True), turn=None, **changes) -> Maker:
        """answer, turn: what the target says for itself and for its users."""

        def reply(prompt):
            return answer(prompt) if prompt.endswith(HEADER) else turn(prompt)

        settings = dict(num_prompts=40, max_prompt_tokens=60, followup_share=0.0)
        return Maker(
            config=DataConfig(**{**settings, "num_held_out": 4, **changes}),
            bulk=ScriptedBulk(tokenizer, reply),
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


def made(maker, kind=TRAIN, count=8, **more) -> Part:
    """All parts as one."""
    parts = list(make_parts(maker, kind, count, **more))
    return Part([c for p in parts for c in p.conversations], [t for p in parts for t in p.prompts])


def given(maker, prompts) -> Maker:
    """A maker for the user's prompts."""
    maker.given = list(prompts)
    return maker


def test_prompts_are_drawn_until_there_are_enough_new_ones(make):
    """Of the turns some come out empty, some twice, some too long, and some do not end."""
    numbers = iter(range(1000))
    endings = ["", "same", "x" * 61, "on and on"]

    def turn(prompt):
        number = next(numbers)
        text = endings[number % 8] if number % 8 < 4 else f"turn {number}"
        return text, text != "on and on"

    maker = make(turn=turn)
    part = made(maker, count=30)
    assert len(part.prompts) == len(set(part.prompts)) == len(part.conversations) == 30
    assert maker.counts.repeated_prompts
    assert any("turn " in text for text in part.prompts)
    assert any("topic" in text for text in part.prompts)  # whole ones need no turn written
    assert not any("xxx" in text or "on and on" in text for text in part.prompts)


def test_drawing_ends_where_nothing_new_comes(make):
    maker = make(turn=lambda prompt: ("", True))
    maker.topics = [TOPICS[0]]
    assert len(made(maker, count=400).prompts) < 200


def test_user_turns_are_sampled_and_told_apart(make):
    maker = make(turn=lambda prompt: ("and so", True))
    made(maker, count=20)
    turns = [
        each
        for each in maker.bulk.asked
        if not maker.tokenizer.decode(each.prompt_ids, skip_special_tokens=False).endswith(HEADER)
    ]
    assert len(turns) > 5
    assert {each.params.temperature for each in turns} == {1.0}
    assert len({each.params.seed for each in turns}) == len(turns)
    assert not any(each.stop_loops for each in turns)


def test_prompts_that_held_out_ones_hold_are_left_out(make):
    maker = given(make(), ["what is tea?", "of 13 shared letters", "fine"])
    text = "another of 13 shared letters"
    maker.shared = SharedText([("What is tea", []), (text, maker.tokenizer.encode(text))])
    maker.given = [*["-"] * maker.config.num_held_out, *maker.given]
    assert made(maker, count=3).prompts == ["fine"]
    assert maker.counts.shared_with_held_out == 2


def test_given_prompts_are_split_and_come_once(make):
    prompts = [f"prompt {i}" for i in range(10)]
    maker = given(make(), prompts)
    assert made(maker, HELD_OUT, 4).prompts == prompts[:4]
    assert made(maker, TRAIN, 4).prompts == prompts[4:8]
    assert made(maker, TRAIN, 4).prompts == prompts[8:]
    assert made(maker, TRAIN, 4).prompts == []


def test_parts_are_handed_out_as_they_fill(make):
    maker = given(make(part_size=4), [f"prompt {i}" for i in range(4 + 10)])
    sizes = [len(part.prompts) for part in make_parts(maker, TRAIN, 10)]
    assert sum(sizes) == 10
    assert all(4 <= size <= 5 for size in sizes[:-1])  # two are complete at once


def test_nothing_begins_after_the_time(make):
    maker = given(make(), [f"prompt {i}" for i in range(20)])
    assert made(maker, count=16, until=float("-inf")).prompts == []
    assert maker.bulk.asked == []


def test_answers_are_supervised_and_prompts_are_not(make, tokenizer):
    maker = given(make(num_held_out=0), ["is it so?"])
    part = made(maker)
    (conversation,) = part.conversations
    assert part.prompts == ["is it so?"]
    ids = conversation.token_ids
    prompt = tokenizer.encode_chat([{"role": "user", "content": "is it so?"}])
    assert ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(ids[conversation.supervised], skip_special_tokens=False) == (
        "yes, indeed<|im_end|>"
    )
    assert not conversation.supervised[: len(prompt)].any()


def test_a_loop_is_cut_off_where_it_begins(make, tokenizer):
    fresh = "".join(chr(ord("!") + i) for i in range(40))
    maker = given(make(lambda _: (fresh + "ab" * 40, False), num_held_out=0), ["go on"])
    (conversation,) = made(maker).conversations
    assert tokenizer.decode(conversation.token_ids[conversation.supervised]) == fresh + "ab"
    assert maker.counts.answers_cut_at_loops == 1
    assert all(each.stop_loops for each in maker.bulk.asked)


def test_held_out_answers_are_greedy_and_a_share_of_the_others_is_not(make):
    prompts = [f"prompt {i}" for i in range(80)]
    settings = dict(num_prompts=90, num_held_out=40, sampled_share=0.5)
    maker = given(make(followup_share=1.0, **settings), prompts)
    made(maker, HELD_OUT, 40)
    assert [each.params.greedy for each in maker.bulk.asked] == [True] * 40
    maker = given(make(**settings), prompts)
    made(maker, TRAIN, 40)
    assert 10 < sum(each.params.greedy for each in maker.bulk.asked) < 30


def test_answers_that_held_out_prompts_hold_are_left_out(make):
    answer = "as they say: thirteen letters or more"
    maker = given(make(lambda _: (answer, True), num_held_out=0), ["say"])
    maker.shared = SharedText([("held", maker.tokenizer.encode("thirteen letters or more"))])
    part = made(maker)
    assert (part.conversations, part.prompts) == ([], ["say"])
    assert maker.counts.shared_with_held_out == 1


def test_some_chats_go_on_and_some_answers_become_a_text_at_hand(make, tokenizer):
    numbers = iter(range(100))

    def turn(prompt):
        number = next(numbers)
        return (f"and then {number}?" if number else ""), True

    settings = dict(followup_share=1.0, max_tokens=400, num_held_out=0)
    maker = given(
        make(lambda prompt: (f"answer to {prompt[-40:-30]}", True), turn, **settings),
        [f"prompt {i}" for i in range(8)],
    )
    part = made(maker)
    assert len(part.prompts) == 8
    assert len(part.conversations) == 8 + 3 + 4  # one imagined turn came to nothing
    asked = [
        tokenizer.decode(each.prompt_ids, skip_special_tokens=False) for each in maker.bulk.asked
    ]
    going_on = [p for p in asked if p.count("<|im_start|>user") == 2 and p.endswith(HEADER)]
    assert len(going_on) == 3
    assert "answer to" in going_on[0].split("and then 1?")[0]
    at_hand = [p for p in asked if p.count("<|im_start|>user") == 1 and "answer to" in p]
    assert len(at_hand) == 4
    tasks = {task.split("{text}")[0] for task in TASKS}
    for prompt in at_hand:
        said = prompt.removeprefix("<|im_start|>user\n")
        assert any(said.startswith(task) for task in tasks)


def test_an_unfinished_or_empty_answer_is_not_followed_up(make):
    def answer(prompt):
        return ("  ", True) if "one" in prompt else ("on and on", False)

    maker = given(make(answer, followup_share=1.0, num_held_out=0), ["one", "two"])
    part = made(maker)
    assert len(maker.bulk.asked) == len(part.conversations) == 2
    assert all(c.supervised.sum() > 1 for c in part.conversations)
