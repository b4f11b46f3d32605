"""Where prompts come from: the user's file, or openings about topics that the target completes.

Host only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.tokenizer import Message, Tokenizer
from jaxspec.training.config import TrainingError

# User turns as they are, about a topic.
WHOLE = (
    "What is {topic}?",
    "What is {topic} and why does it matter?",
    "Explain {topic} in simple terms.",
    "Explain {topic} to a ten-year-old.",
    "Tell me about {topic}.",
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write a paragraph about {topic}.",
    "Give me five facts about {topic}.",
    "List the main advantages and disadvantages of {topic}.",
    "How does {topic} work?",
    "What is the history of {topic}?",
    "Describe {topic} in three sentences.",
    "Write an introduction to an article about {topic}.",
    "What are some common misconceptions about {topic}?",
    "Write a dialogue between two friends about {topic}.",
    "How can I learn more about {topic}?",
    "Write a Python function that models {topic}.",
    "Write a Python class for {topic} with three methods and show how to use it.",
    "Write a short email to a colleague about {topic}.",
    "What questions should I ask an expert on {topic}?",
    "Give me a step-by-step guide to {topic}.",
    "Give me some tips for {topic}.",
    "Who uses {topic}, and for what?",
    "What should a beginner know about {topic}?",
    "Summarize what is known about {topic}.",
    "Make a list of ten things about {topic}.",
    "Write a letter of complaint about {topic}.",
    "Write a speech about {topic}.",
    "Write a news report about {topic}.",
    "Write a product description of {topic}.",
    "Write a blog post about {topic} for beginners.",
    "Write a haiku about {topic}.",
    "Write a quiz of five questions about {topic}, with answers.",
    "Write a Python function about {topic} with a docstring and a test.",
    "Write a SQL table for {topic} and three queries on it.",
    "Write an HTML page about {topic}.",
    "What is the difference between {topic} and {other}?",
    "Compare {topic} and {other}.",
    "How does {topic} affect {other}?",
    "What is the role of {topic} in {other}?",
    "Write a story in which {topic} meets {other}.",
    "Explain {topic} to someone who knows {other}.",
    "Which is more important, {topic} or {other}?",
    "Plan a lesson about {topic} and {other}.",
)
# Beginnings that the target completes.
OPEN = (
    "Can you explain",
    "Can you help me",
    "Could you write",
    "How do I",
    "How can",
    "How does {topic}",
    "What is the",
    "What are the",
    "What are some",
    "What would happen if {topic}",
    "Why is {topic}",
    "Why do",
    "Who",
    "When",
    "Which",
    "Is it",
    "Write a",
    "Write a story about {topic}",
    "Write an essay on {topic}",
    "Write an email",
    "Write a letter",
    "Write a Python function that",
    "Write a Python program to",
    "Write a function",
    "Complete the following Python function:\n\n```python\ndef ",
    "Fix this Python code:\n\n```python\n",
    "Write a SQL query",
    "Write a JavaScript function",
    "Write a program in C",
    "Solve the following problem:",
    "Calculate",
    "Translate",
    "Summarize",
    "Rewrite the following sentence",
    "Create a",
    "Give me",
    "List",
    "Describe",
    "Compare {topic}",
    "Suggest",
    "Plan",
    "Explain how {topic}",
    "Tell me",
    "I need",
    "I want to",
    "I am",
    "I'm looking for",
    "My",
    "Let's",
    "Imagine",
    "Given",
    "In the context of {topic},",
    "Regarding {topic},",
    "What is the best way to",
    "What is the difference between",
    "What is the difference between {topic} and",
    "Can you recommend",
    "Can you give me an example of",
    "Can you tell me about {topic} and",
    "Do you know",
    "Should I",
    "How many",
    "How would you explain {topic}",
    "I have a question about {topic}:",
    "I am writing about {topic}.",
    "As a teacher,",
    "You are",
    "Please",
    "Hello,",
    "Generate",
    "Design a",
    "Develop a",
    "Provide",
    "Identify",
    "Convert",
    "Classify",
    "Find",
    "Write a Python script that",
    "Write a function that takes a list",
    "Write a class",
    "Write a short paragraph about {topic} and",
    "Write a dialogue between",
    "Write a review of",
    "Write a summary of {topic}",
    "Complete the following Python function:\n\n```python\nfrom typing import List\n\n\ndef ",
    "Complete this code:\n\n```python\nimport ",
    "Explain this code:\n\n```python\n",
    "Correct the grammar of this sentence:",
    "Rewrite the following text:",
    "Make this email more polite:",
    "Answer the following question:",
    "A train",
    "If",
)
# Tasks on a text at hand, which users bring along as often as not.
TASKS = (
    "Summarise this text in two sentences:\n\n{text}",
    "Summarize the following:\n\n{text}",
    "Copy this text and correct any mistake you find:\n\n{text}",
    "Rewrite this in a more formal tone:\n\n{text}",
    "Rewrite this text so that a child understands it:\n\n{text}",
    "Make this shorter:\n\n{text}",
    "Explain step by step what this says:\n\n{text}",
    "What is this text about?\n\n{text}",
    "Give this text a title and list its main points:\n\n{text}",
    "List every name and number in this text:\n\n{text}",
    "Translate this into Spanish:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Write three questions about this text and answer them:\n\n{text}",
    "{text}\n\nWhat is wrong with the text above?",
    "{text}\n\nTurn the text above into a list.",
)
_SHARES = (0.35, 0.45, 0.2)  # whole turns, beginnings, and turns that are the target's alone
_MARK = "a-turn-0f-a-user"
_HELD_OUT_TOPICS = 20  # one topic in so many
_FALLBACK_TOPICS = (
    "the moon", "bread", "chess", "volcanoes", "jazz", "bicycles", "democracy", "honey", "dreams",
    "glass", "rivers", "medieval castles", "vaccination", "soil", "magnets", "poetry", "robots",
    "friendship", "coral reefs", "inflation", "tea", "gravity", "photography", "wolves", "origami",
    "electric cars", "the Roman Empire", "sleep", "algebra", "recycling", "basketball", "opera",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """How a model's template frames a user's first turn: text before it and text after it."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a user turn. whole: nothing is to be added."""

    text: str
    whole: bool


def chat_frame(tokenizer: Tokenizer, before: Sequence[Message] = ()) -> ChatFrame:
    """Reads the frame of a user's next turn off the chat template.

    Raises:
        TrainingError: the model has no chat template, or one that changes what users say.
    """
    if not tokenizer.has_chat_template:
        raise TrainingError(
            f"{tokenizer.name} has no chat template, so it cannot make prompts itself or answer "
            "them; choose a model that was tuned for chat"
        )
    text = tokenizer.apply_chat_template([*before, {"role": "user", "content": _MARK}])
    if text.count(_MARK) != 1:
        raise TrainingError(
            f"the chat template of {tokenizer.name} does not keep a user's turn as it is; choose "
            "another model"
        )
    return ChatFrame(*text.split(_MARK))


def read_prompts(path: Path) -> list[str]:
    """Reads user turns: one a line of text, or of JSON where the file's name ends in .jsonl.

    A JSON line is a string, {"prompt": text}, or {"messages": [...]} whose first user turn counts.

    Raises:
        TrainingError: the file is missing, empty, or a line is none of these.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TrainingError(
            f"{path} cannot be read as prompts ({why}); give a text file with a prompt a line, or "
            ".jsonl"
        ) from None
    is_json = path.suffix == ".jsonl"
    prompts = [
        _prompt_of(line, path, number) if is_json else line.strip()
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise TrainingError(f"{path} holds no prompt; write one a line")
    return prompts


def _prompt_of(line: str, path: Path, number: int) -> str:
    try:
        prompt = _user_turn(json.loads(line))
    except (ValueError, KeyError, TypeError, StopIteration):
        prompt = None
    if not isinstance(prompt, str):
        raise TrainingError(
            f"{path} line {number} is no prompt ({line[:40]!r}); write a JSON string, "
            '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
        )
    return prompt.strip()


def _user_turn(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if "prompt" in value:
        return value["prompt"]
    return next(m["content"] for m in value["messages"] if m["role"] == "user")


def read_topics(path: Path | None) -> list[str]:
    """Reads topics: a word or phrase a line, or WordNet's index.noun; None: a few of our own.

    Raises:
        TrainingError: the file is missing or holds no topic.
    """
    if path is None:
        return list(_FALLBACK_TOPICS)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as topics ({error})") from None
    words = [topic for line in lines if (topic := _topic_of(line))]
    topics = [word for word in words if re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,40}", word)]
    if not topics:
        raise TrainingError(f"{path} holds no topic; write a word or a phrase a line")
    return sorted(set(topics))


def _topic_of(line: str) -> str:
    """The topic of a line; of WordNet's index.noun only words that its texts hold.

    Its lines: lemma, n, senses, count of pointers, the pointers, senses again, senses that occur
    in texts, offsets (wndb(5WN)). Its licence stands indented on top.
    """
    if line.startswith("  "):
        return ""
    fields = line.split()
    if len(fields) < 6 or fields[1] != "n" or not fields[3].isdecimal():
        return line.strip()
    tagged = fields[4 + int(fields[3]) + 1]
    return "" if tagged == "0" else fields[0].replace("_", " ")


def is_held_out_topic(topic: str) -> bool:
    """Whether a topic is kept for held-out prompts: the same on every machine."""
    digest = hashlib.sha256(topic.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_TOPICS == 0


@functools.lru_cache(maxsize=2)
def topics_of_side(topics: tuple[str, ...], *, held_out: bool) -> tuple[str, ...]:
    """The topics of training prompts, or of held-out ones.

    Raises:
        TrainingError: there is no topic on that side.
    """
    side = tuple(topic for topic in topics if is_held_out_topic(topic) == held_out)
    if not side:
        raise TrainingError(
            f"none of {len(topics)} topics is kept for {'held-out' if held_out else 'training'} "
            "prompts; give more topics"
        )
    return side


def draw_openings(
    topics: Sequence[str], count: int, rng: np.random.Generator, *, held_out: bool
) -> list[Opening]:
    """Draws beginnings of user turns about the topics of one side.

    Held-out turns are always about a topic, since otherwise nothing keeps the two sets apart.
    """
    open_ = [text for text in OPEN if not held_out or "{topic}" in text]
    shares = np.array(_SHARES)
    if held_out:
        shares[2] = 0
    kinds = rng.choice(3, count, p=shares / shares.sum())
    openings = []
    for kind in kinds:
        topic, other = (topics[at] for at in rng.integers(len(topics), size=2))
        choices = (WHOLE, open_, ("",))[kind]
        text = choices[rng.integers(len(choices))].format(topic=topic, other=other)
        openings.append(Opening(text[:1].upper() + text[1:], whole=bool(kind == 0)))
    return openings
