"""Where prompts come from."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.tokenizer import load_tokenizer
from jaxspec.training.config import TrainingError
from jaxspec.training.prompts import (
    chat_frame,
    draw_openings,
    is_held_out_topic,
    read_prompts,
    read_topics,
    topics_of_side,
)
from tests.tiny_model import write_tiny_model

TOPICS = [f"topic {letter}{other}" for letter in "abcdefgh" for other in "abcdefgh"]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = write(tmp_path / "p.txt", "What is bread?\n\n  Why? \n")
    assert read_prompts(path) == ["What is bread?", "Why?"]


def test_json_lines_may_be_strings_prompts_or_messages(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        '"one"\n{"prompt": "two"}\n{"messages": [{"role": "system", "content": "s"}, '
        '{"role": "user", "content": "three"}]}\n',
    )
    assert read_prompts(path) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", " \n\n", "p.txt holds no prompt; write one a line"),
        ("p.jsonl", "", "p.jsonl holds no prompt"),
        ("p.jsonl", '"a"\n{"prompt": 3}\n', "line 2 is no prompt"),
        ("p.jsonl", '{"messages": []}\n', "line 1 is no prompt"),
        ("p.jsonl", "{oops\n", "line 1 is no prompt .*write a JSON string"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path, name, text, message):
    with pytest.raises(TrainingError, match=message):
        read_prompts(write(tmp_path / name, text))


def test_an_unreadable_prompt_file_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"cannot be read as prompts .No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TrainingError, match="it is not UTF-8"):
        read_prompts(tmp_path / "p.txt")


def test_topics_are_words_or_the_index_of_wordnet(tmp_path):
    index = (
        "  1 This software and database is being provided to you\n"
        "coral_reef n 1 2 @ #m 1 1 09284015\n"
        "genus_acer n 1 2 @ #m 1 0 12750767\n"
        "1530s n 1 2 @ ~ 1 1 15149933\n"
        "bread n 2 5 @ ~ #m #s %s 2 1 07679356 13279262\n"
    )
    assert read_topics(write(tmp_path / "index.noun", index)) == ["bread", "coral reef"]
    assert read_topics(write(tmp_path / "w.txt", "tea\ntea\njazz music\n")) == ["jazz music", "tea"]
    assert len(read_topics(None)) > 20


def test_topics_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="holds no topic"):
        read_topics(write(tmp_path / "w.txt", "1\n2\n"))
    with pytest.raises(TrainingError, match="cannot be read as topics"):
        read_topics(tmp_path / "none")


def test_held_out_openings_are_about_topics_of_their_own():
    held_out = {topic for topic in TOPICS if is_held_out_topic(topic)}
    assert 0 < len(held_out) < 10
    rng = np.random.default_rng(0)
    openings = draw_openings(topics_of_side(tuple(TOPICS), held_out=True), 200, rng, held_out=True)
    assert all(any(topic in o.text.lower() for topic in held_out) for o in openings)
    training = draw_openings(
        topics_of_side(tuple(TOPICS), held_out=False), 200, rng, held_out=False
    )
    assert not any(topic in o.text.lower() for o in training for topic in held_out)
    assert {o.text for o in training if not o.whole and not o.text} == {""}
    assert any(o.whole for o in training)


def test_a_side_without_topics_is_refused():
    side = tuple(topic for topic in TOPICS if not is_held_out_topic(topic))
    with pytest.raises(TrainingError, match=r"none of .* topics is kept for held-out"):
        topics_of_side(side, held_out=True)


def test_the_chat_frame_is_what_stands_around_a_turn(tmp_path):
    tokenizer = load_tokenizer(write_tiny_model(tmp_path / "model"), name="tiny")
    frame = chat_frame(tokenizer)
    assert frame.before == "<|im_start|>user\n"
    assert frame.after == "<|im_end|>\n<|im_start|>assistant\n"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat_frame(tokenizer, said).before.endswith("b<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "tiny has no chat template"),
        ("{{ messages[0].content | upper }}", "does not keep a user's turn"),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused(tmp_path, template, message):
    folder = write_tiny_model(tmp_path / "model", chat_template=template)
    with pytest.raises(TrainingError, match=message):
        chat_frame(load_tokenizer(folder, name="tiny"))
