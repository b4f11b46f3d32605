"""The built-in prompts: a mixture of what people ask, by kind. Host only.

Kinds differ in how much of the answer stands in the prompt already, which is what prompt lookup
lives on: an edit repeats nearly all of it, an open question nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxspec.training.prompts import read_prompts


class BenchPrompt(NamedTuple):
    """A prompt and what kind of task it is."""

    kind: str
    text: str


_STORY = (
    "The lighthouse keeper woke before dawn. The storm had broken two windows in the night, and "
    "sea water stood on the kitchen floor. He lit the stove, put the kettle on, and went up to see "
    "whether the lamp still burned. It did. Far out, a small boat was rowing towards the rocks."
)
_CODE = (
    "def average(values):\n"
    "    total = 0\n"
    "    count = 0\n"
    "    for value in values:\n"
    "        total = total + value\n"
    "        count = count + 1\n"
    "    return total / count\n"
)
_LETTER = (
    "Dear Ms Moreau, thank you for your order of 12 March. The blue lamp (number 4471) has left "
    "our house today and should reach Lyon by Friday. The desk (number 2098) is late: our supplier "
    "in Porto expects it on 2 April. Your total is 348.50 euros. Kind regards, Jonas Weber"
)

PROMPTS = (
    BenchPrompt("question", "What is the capital of France?"),
    BenchPrompt("question", "Why is the sky blue? Explain it to a child."),
    BenchPrompt("question", "What are the main differences between a virus and a bacterium?"),
    BenchPrompt("list", "List ten European countries with their capitals."),
    BenchPrompt("list", "Write the numbers from one to thirty as words, one on each line."),
    BenchPrompt("story", "Tell a short story about a robot that learns to paint."),
    BenchPrompt("story", "Write a poem of three verses about rain in the mountains."),
    BenchPrompt("code", "Write a Python function that tells whether a word is a palindrome."),
    BenchPrompt("code", f"Explain step by step what this function does:\n\n{_CODE}"),
    BenchPrompt("edit", f"Rename `values` to `numbers` in this function:\n\n{_CODE}"),
    BenchPrompt("edit", f"Copy this text and correct any mistake you find:\n\n{_STORY}"),
    BenchPrompt("summary", f"Summarise this text in two sentences:\n\n{_STORY}"),
    BenchPrompt("extract", f"List every number in this letter with its meaning:\n\n{_LETTER}"),
    BenchPrompt("extract", f"Who wrote this letter, to whom, and about what?\n\n{_LETTER}"),
    BenchPrompt("maths", "A train goes 60 km in 45 minutes. How far does it go in two hours?"),
    BenchPrompt("maths", "Solve 3x + 7 = 25 and show each step."),
)


def all_prompts(files: Sequence[str]) -> list[BenchPrompt]:
    """The prompts of all `prompt_sets`, one set after the other."""
    return [prompt for prompts in prompt_sets(files).values() for prompt in prompts]


def prompt_sets(files: Sequence[str]) -> Mapping[str, Sequence[BenchPrompt]]:
    """The sets by name: the files', each under its name without endings, else the built-in one.

    Raises:
        TrainingError: a file cannot be read, or holds no prompt.
    """
    if not files:
        return {"built-in": PROMPTS}
    sets = {}
    for file in map(Path, files):
        name = file.name.partition(".")[0]
        sets[name] = [BenchPrompt(name, text) for text in read_prompts(file)]
    return sets
