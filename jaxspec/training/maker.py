"""What one part of the data holds: new prompts, the target's answers, and chats that go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.models.config import ModelConfig
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.config import DataConfig
from jaxspec.training.conversations import HELD_OUT, TRAIN
from jaxspec.training.filters import SharedText, loop_start, text_key
from jaxspec.training.generate import OnTokens, answers_wanted, complete, write_user_turns
from jaxspec.training.prompts import TASKS, ChatFrame, Opening, chat_frame, draw_openings
from jaxspec.training.rows import Conversation
from jaxspec.weights.files import Progress

Chat = list[dict[str, str]]  # turns, {"role": ..., "content": ...}
_OWN_PROMPT_YIELD = 1.25  # openings drawn for each prompt wanted: some turns do not end
_MAX_DRAWS = 8  # attempts at enough prompts before giving up


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
    engine: Engine
    model: ModelConfig
    tokenizer: Tokenizer
    frame: ChatFrame
    topics: list[str]
    given: list[str] | None  # the user's prompts
    counts: Counts
    seen: set[str]
    progress: Progress
    shared: SharedText = field(default_factory=lambda: SharedText([]))


def draw_prompts(maker: Maker, kind: str, number: int, count: int) -> list[str]:
    """New user turns that are in neither set yet."""
    if maker.given is not None:
        held_out = maker.config.num_held_out
        ordered = maker.given[:held_out] if kind == HELD_OUT else maker.given[held_out:]
        return _fresh(maker, ordered, kind, count)
    prompts: list[str] = []
    rng = np.random.default_rng([maker.config.seed, number, kind == HELD_OUT])
    for draw in range(_MAX_DRAWS):
        missing = count - len(prompts)
        if missing <= 0:
            break
        openings = draw_openings(
            maker.topics, int(missing * _OWN_PROMPT_YIELD) + 8, rng, held_out=kind == HELD_OUT
        )
        turns = write_user_turns(
            maker.engine,
            maker.tokenizer,
            [(maker.frame, opening) for opening in openings],
            max_tokens=maker.config.max_prompt_tokens,
            seed=int(rng.integers(1 << 40)),
            on_tokens=_shown(maker, f"{kind} part {number}: prompts, draw {draw + 1}"),
        )
        prompts += _fresh(maker, turns, kind, missing)
    return prompts


def _fresh(maker: Maker, texts: Sequence[str], kind: str, count: int) -> list[str]:
    """The first so many that are new, not too long, and share nothing with held-out prompts."""
    fresh: list[str] = []
    for text in texts:
        if len(fresh) == count:
            break
        key = text_key(text)
        if not key or key in maker.seen:
            maker.counts.repeated_prompts += maker.given is None
            continue
        ids = maker.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > maker.config.max_prompt_tokens:
            continue
        if kind == TRAIN and maker.shared.holds(text, ids):
            maker.counts.shared_with_held_out += 1
            continue
        maker.seen.add(key)
        fresh.append(text)
    return fresh


def answer(
    maker: Maker, kind: str, number: int, prompts: list[str]
) -> tuple[list[Conversation], list[str]]:
    """Lets the target answer; held-out answers are all greedy and to first turns only."""
    seed = int(np.random.default_rng([maker.config.seed, number, 7]).integers(1 << 40))
    chats = [[{"role": "user", "content": text}] for text in prompts]
    answered = _write_answers(maker, chats, kind, f"{kind} part {number}: answers", seed)
    conversations = [conversation for conversation, _ in answered if conversation is not None]
    if kind == TRAIN and maker.config.followup_share:
        chats = _follow_up(maker, chats, answered, number, seed)
        more = _write_answers(maker, chats, kind, f"{kind} part {number}: second turns", seed + 1)
        conversations += [conversation for conversation, _ in more if conversation is not None]
    return conversations, prompts


def _write_answers(
    maker: Maker, chats: list[Chat], kind: str, what: str, seed: int
) -> list[tuple[Conversation | None, str]]:
    """(conversation, text of the answer) of each chat; None for what is no good to learn from."""
    config = maker.config
    prompts = [tuple(maker.tokenizer.encode_chat(chat)) for chat in chats]
    wanted = answers_wanted(
        prompts,
        max_tokens=config.max_tokens,
        sampled_share=0.0 if kind == HELD_OUT else config.sampled_share,
        temperature=config.temperature,
        seed=seed,
    )
    results = complete(maker.engine, wanted, stop_loops=True, on_tokens=_shown(maker, what))
    answered: list[tuple[Conversation | None, str]] = []
    for ids, result in zip(prompts, results, strict=True):
        answer = result.token_ids
        start = loop_start(answer)
        if start is not None:
            maker.counts.answers_cut_at_loops += 1
            answer = answer[:start]
        text = maker.tokenizer.decode(answer) if start is None and result.ended else ""
        if kind == TRAIN and maker.shared.holds(text, answer):
            maker.counts.shared_with_held_out += 1
            answered.append((None, ""))
            continue
        tokens = np.array([*ids, *answer], np.int32)
        conversation = Conversation(tokens, np.arange(len(tokens)) >= len(ids))
        answered.append((conversation if len(answer) > 1 else None, text))
    return answered


def _follow_up(
    maker: Maker,
    chats: list[Chat],
    answered: list[tuple[Conversation | None, str]],
    number: int,
    seed: int,
) -> list[Chat]:
    """New chats out of some that ended well: half go on, half bring the answer as a text at hand.

    What a user says next, the target imagines.
    """
    rng = np.random.default_rng([maker.config.seed, number, 11])
    chosen = [
        [*chat, {"role": "assistant", "content": text}]
        for chat, (conversation, text) in zip(chats, answered, strict=True)
        if conversation is not None
        and text.strip()
        and len(conversation.token_ids) <= maker.config.max_tokens
        and rng.random() < maker.config.followup_share
    ]
    going_on, at_hand = chosen[::2], chosen[1::2]
    turns = write_user_turns(
        maker.engine,
        maker.tokenizer,
        [(chat_frame(maker.tokenizer, chat), Opening("", whole=False)) for chat in going_on],
        max_tokens=maker.config.max_prompt_tokens,
        seed=seed,
        on_tokens=_shown(maker, f"{TRAIN} part {number}: next turns"),
    )
    second = [
        [*chat, {"role": "user", "content": turn}]
        for chat, turn in zip(going_on, turns, strict=True)
        if turn
    ]
    tasks = rng.integers(len(TASKS), size=len(at_hand))
    return second + [
        [{"role": "user", "content": TASKS[task].format(text=chat[-1]["content"])}]
        for chat, task in zip(at_hand, tasks, strict=True)
    ]


def _shown(maker: Maker, what: str) -> OnTokens:
    """Shows on the display how far a stage is."""
    return lambda done, total, tokens: maker.progress(what, done, total)
