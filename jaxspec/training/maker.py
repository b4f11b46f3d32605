"""From an opening to a conversation: new prompts, the target's answers, and chats that go on.

There are no stages: what is complete leads to what is wanted next, so that all slots are busy with
whatever there is, and only the end of the whole run finds some of them empty.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.models.config import ModelConfig
from jaxspec.request import SamplingParams
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.bulk import Bulk, Completed, Wanted
from jaxspec.training.config import DataConfig
from jaxspec.training.conversations import HELD_OUT, TRAIN
from jaxspec.training.filters import SharedText, loop_start, text_key
from jaxspec.training.prompts import (
    TASKS,
    ChatFrame,
    Opening,
    chat_frame,
    draw_openings,
    topics_of_side,
)
from jaxspec.training.rows import Conversation
from jaxspec.weights.files import Progress

Chat = list[dict[str, str]]  # turns, {"role": ..., "content": ...}
_DRAWN_AT_ONCE = 1024  # openings
_MAX_DRAWS = 8  # openings for each prompt wanted, before giving up
_TURN = {"temperature": 1.0, "min_p": 0.05}  # how users are imagined: what is hardly likely never


@dataclass(slots=True)
class Counts:
    """What was made and what was left out, over the whole folder."""

    conversations: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    repeated_prompts: int = 0
    shared_with_held_out: int = 0
    answers_cut_at_loops: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Maker:
    """The target and what its folder holds so far."""

    config: DataConfig
    bulk: Bulk
    model: ModelConfig
    tokenizer: Tokenizer
    frame: ChatFrame
    topics: list[str]
    given: list[str] | None  # the user's prompts
    counts: Counts
    seen: set[str]
    progress: Progress
    shared: SharedText = field(default_factory=lambda: SharedText([]))
    pace: str = ""  # of the last part, for the display


@dataclass(slots=True)
class Part:
    """Conversations, and the prompts that they began with."""

    conversations: list[Conversation] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)


def make_parts(
    maker: Maker, kind: str, count: int, *, number: int = 0, until: float = float("inf")
) -> Iterator[Part]:
    """Makes conversations that begin with `count` new prompts, a part at a time.

    Args:
        maker: the target.
        kind: TRAIN or HELD_OUT, whose answers are all greedy, and to first turns only.
        count: of prompts at most.
        number: of the first part; draws differ by it.
        until: of `time.monotonic()`; no prompt is begun after it.
    """
    flow = _Flow(maker, kind, count, number, until)
    while flow.advance():
        if len(flow.part.prompts) >= maker.config.part_size:
            yield flow.take_part()
    if flow.part.prompts:
        yield flow.take_part()


class _Flow:
    """Conversations in the making."""

    def __init__(self, maker: Maker, kind: str, count: int, number: int, until: float):
        self.part = Part()
        self._maker, self._kind, self._count, self._until = maker, kind, count, until
        self._rng = np.random.default_rng([maker.config.seed, number, kind == HELD_OUT])
        self._given = iter(self._given_prompts()) if maker.given is not None else None
        self._openings: list[Opening] = []
        self._num_drawn = 0
        self._num_turns = 0  # user turns in the making
        self._num_asked = 0  # prompts that were answered, or will be
        self._num_answered = 0
        self._num_followed = 0
        self._is_over = False
        self._framed = len(self._encode(maker.frame.before + maker.frame.after))

    def advance(self) -> bool:
        """Lets the target write on; False once all is done."""
        bulk, maker = self._maker.bulk, self._maker
        if not self._is_over and time.monotonic() >= self._until:
            self._is_over = True
            bulk.drop_waiting()
        self._feed()
        if not bulk.has_unfinished:
            return False
        for completed in bulk.step():
            completed.wanted.then(completed)
        maker.progress(f"{self._kind} conversations{maker.pace}", self._num_answered, self._count)
        return True

    def take_part(self) -> Part:
        """What is complete; a new part begins."""
        part, self.part = self.part, Part()
        return part

    def _given_prompts(self) -> Sequence[str]:
        held_out, given = self._maker.config.num_held_out, self._maker.given
        return given[:held_out] if self._kind == HELD_OUT else given[held_out:]

    def _feed(self) -> None:
        """Begins as many conversations as keep all slots busy while the next are thought of."""
        bulk = self._maker.bulk
        while (
            not self._is_over
            and bulk.num_waiting < bulk.geometry.num_slots
            and self._num_asked + self._num_turns < self._count
        ):
            if not self._begin():
                break

    def _begin(self) -> bool:
        """Takes the next prompt or opening; False where there is none."""
        if self._given is not None:
            text = next(self._given, None)
            if text is not None:
                self._ask(text)
            return text is not None
        if not self._openings:
            self._draw()
        if not self._openings:
            return False
        opening = self._openings.pop()
        if opening.whole:
            self._ask(opening.text)
        else:
            self._num_turns += 1
            self._write_turn(
                self._maker.frame.before + opening.text,
                functools.partial(self._turn_written, opening),
            )
        return True

    def _draw(self) -> None:
        """Draws openings, as often as may be needed: some turns do not end, others came before."""
        maker = self._maker
        left = _MAX_DRAWS * self._count - self._num_drawn
        side = topics_of_side(tuple(maker.topics), held_out=self._kind == HELD_OUT)
        drawn = draw_openings(
            side, min(_DRAWN_AT_ONCE, left), self._rng, held_out=self._kind == HELD_OUT
        )
        self._num_drawn += len(drawn)
        self._openings = drawn[::-1]

    def _write_turn(self, start: str, then: Any) -> None:
        """Lets the target complete a user's turn by sampling, as it imagines its users (Magpie,
        arXiv 2406.08464).
        """
        self._add(
            self._encode(start),
            {**_TURN, "max_tokens": self._maker.config.max_prompt_tokens},
            then=then,
        )

    def _turn_written(self, opening: Opening, turn: Completed) -> None:
        self._num_turns -= 1
        if turn.ended:
            self._ask((opening.text + self._text_of(turn)).strip())

    def _text_of(self, turn: Completed) -> str:
        """The turn without the chat's frame."""
        return self._maker.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True)

    def _ask(self, text: str) -> None:
        """Has a prompt answered that is new, not too long, and shares nothing with held-out ones.

        It counts as asked from here on.
        """
        maker, key = self._maker, text_key(text)
        if self._is_over:
            return
        if not key or key in maker.seen:
            maker.counts.repeated_prompts += maker.given is None
            return
        ids = self._encode(maker.frame.before + text + maker.frame.after)
        if len(ids) - self._framed > maker.config.max_prompt_tokens:
            return
        if self._kind == TRAIN and maker.shared.holds(text, ids):
            maker.counts.shared_with_held_out += 1
            return
        maker.seen.add(key)
        self._num_asked += 1
        chat = [{"role": "user", "content": text}]
        self._write_answer(ids, chat, functools.partial(self._answered, chat))

    def _write_answer(self, ids: list[int], chat: Chat, then: Any) -> None:
        config = self._maker.config
        hot = self._kind == TRAIN and self._rng.random() < config.sampled_share
        settings = {"temperature": config.temperature if hot else 0.0}
        self._add(ids, {**settings, "max_tokens": config.max_tokens}, stop_loops=True, then=then)

    def _answered(self, chat: Chat, answer: Completed) -> None:
        """Takes an answer to a first turn, and may let the chat go on."""
        self._num_answered += 1
        self.part.prompts.append(chat[0]["content"])
        kept, is_whole = self._keep(answer)
        config = self._maker.config
        if self._is_over or self._kind == HELD_OUT or not (kept and is_whole):
            return
        if len(answer.wanted.prompt_ids) + len(answer.token_ids) > config.max_tokens:
            return
        if self._rng.random() >= config.followup_share:
            return
        text = self._maker.tokenizer.decode(answer.token_ids.tolist())
        if not text.strip():
            return
        self._num_followed += 1
        if self._num_followed % 2:
            said = [*chat, {"role": "assistant", "content": text}]
            self._write_turn(
                chat_frame(self._maker.tokenizer, said).before,
                functools.partial(self._next_turn_written, said),
            )
            return
        task = TASKS[self._rng.integers(len(TASKS))].format(text=text)
        self._second_answer([{"role": "user", "content": task}])

    def _next_turn_written(self, said: Chat, turn: Completed) -> None:
        text = self._text_of(turn).strip()
        if text and turn.ended and not self._is_over:
            self._second_answer([*said, {"role": "user", "content": text}])

    def _second_answer(self, chat: Chat) -> None:
        self._write_answer(self._maker.tokenizer.encode_chat(chat), chat, self._keep)

    def _keep(self, answer: Completed) -> tuple[bool, bool]:
        """Adds a conversation to the part; returns (it is good to learn from, it is whole)."""
        maker, ids = self._maker, answer.token_ids
        start = loop_start(ids)
        if start is not None:
            maker.counts.answers_cut_at_loops += 1
            ids = ids[:start]
        if self._kind == TRAIN and maker.shared.holds_run(ids):
            maker.counts.shared_with_held_out += 1
            return False, False
        if len(ids) < 2:
            return False, False
        prompt = answer.wanted.prompt_ids
        tokens = np.array([*prompt, *ids], np.int32)
        self.part.conversations.append(Conversation(tokens, np.arange(len(tokens)) >= len(prompt)))
        return True, start is None and answer.ended

    def _add(self, ids: list[int], settings: dict[str, Any], **more: Any) -> None:
        """Queues a completion, unless its prompt is too long for the target."""
        bulk, seed = self._maker.bulk, int(self._rng.integers(1 << 40))
        if len(ids) < bulk.geometry.max_model_len:
            bulk.add(Wanted(ids, SamplingParams(**settings, seed=seed), **more))

    def _encode(self, text: str) -> list[int]:
        return self._maker.tokenizer.encode(text, add_special_tokens=False)
