"""Makes training data without a hub: the target answers prompts, its own or the user's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench.prompts import PROMPTS
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import assemble, open_model
from jaxspec.engine.engine import Engine
from jaxspec.models.config import ModelConfig
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.config import DataConfig, TrainingError
from jaxspec.training.conversations import (
    HELD_OUT,
    META,
    TRAIN,
    load_meta,
    parts,
    save_meta,
    save_part,
    write_whole,
)
from jaxspec.training.filters import SharedText, loop_start, text_key
from jaxspec.training.generate import (
    OnTokens,
    answers_wanted,
    build_bulk_engine,
    complete,
    write_user_turns,
)
from jaxspec.training.prompts import (
    TASKS,
    ChatFrame,
    Opening,
    chat_frame,
    draw_openings,
    read_prompts,
    read_topics,
)
from jaxspec.training.rows import Conversation
from jaxspec.weights.files import Progress, no_progress

_OWN_PROMPT_YIELD = 1.25  # openings drawn for each prompt wanted: some turns do not end
Chat = list[dict[str, str]]  # turns, {"role": ..., "content": ...}

_SEQS = {"gpu": 768}  # answers at once; enough that a step reads more KV than weights
_FRAME_TOKENS = 96  # that a chat template may add
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
class _Maker:
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


def make_data(
    config: DataConfig, *, cache_dir: Path, on_progress: Progress = no_progress
) -> Counts:
    """Makes a folder of training data, part by part; goes on where a folder holds parts already.

    Raises:
        TrainingError, ModelFileError: what cannot be used, and the remedy.
    """
    if not config.output:
        raise TrainingError("--output is missing; name a folder")
    started = time.monotonic()
    folder = Path(config.output)
    given = _given_prompts(config)
    topics = read_topics(None if config.topics is None else Path(config.topics))
    maker = _open(config, folder, given, topics, cache_dir, on_progress)
    if config.num_held_out and not parts(folder, HELD_OUT):
        _make_part(maker, folder, HELD_OUT, 0, config.num_held_out)
    kept_apart = read_texts(folder, HELD_OUT) + [prompt.text for prompt in PROMPTS]
    maker.shared = SharedText(
        (text, maker.tokenizer.encode(text, add_special_tokens=False)) for text in kept_apart
    )
    number = len(parts(folder, TRAIN))
    left = config.num_prompts - config.num_held_out - maker.counts.conversations
    while left > 0:
        minutes = (time.monotonic() - started) / 60
        if config.max_minutes is not None and minutes >= config.max_minutes:
            break
        made = _make_part(maker, folder, TRAIN, number, min(config.part_size, left))
        if not made:
            break
        left -= made
        number += 1
    if not maker.counts.conversations:
        raise TrainingError(f"no conversation came out of {config.num_prompts} prompts; give more")
    return maker.counts


def _given_prompts(config: DataConfig) -> list[str] | None:
    if config.prompts is None:
        return None
    unique = {text_key(text): text for text in reversed(read_prompts(Path(config.prompts)))}
    prompts = list(reversed(unique.values()))
    if len(prompts) <= config.num_held_out:
        raise TrainingError(
            f"{config.prompts} holds {len(prompts)} different prompts, and num_held_out is "
            f"{config.num_held_out}; give more prompts or lower it"
        )
    order = np.random.default_rng(config.seed).permutation(len(prompts))
    return [prompts[i] for i in order]


def _open(
    config: DataConfig,
    folder: Path,
    given: list[str] | None,
    topics: list[str],
    cache_dir: Path,
    progress: Progress,
) -> _Maker:
    """Loads the target, and reads what an earlier run has left in the folder."""
    counts, seen = Counts(), set()
    if (folder / META).exists():
        meta = load_meta(folder)
        if meta["model"] != config.model:
            raise TrainingError(
                f"{folder} holds data of {meta['model']}, not {config.model}; choose another output"
            )
        counts = Counts(**meta["counts"])
        for kind in (TRAIN, HELD_OUT):
            seen.update(text_key(text) for text in read_texts(folder, kind))
    longest = config.max_prompt_tokens + config.max_tokens + _FRAME_TOKENS
    if config.followup_share:
        longest += config.max_tokens
    settings = EngineConfig(model=config.model)
    opened = open_model(settings, cache_dir=cache_dir, on_progress=progress)
    assembled = assemble(
        replace(
            settings,
            drafter="none",
            dtype=config.dtype,
            kernels=config.kernels,
            max_num_seqs=config.max_num_seqs or _SEQS.get(jax.default_backend(), 32),
            max_num_batched_tokens=4096,
            max_model_len=min(longest, opened.checkpoint.config.max_position_embeddings),
            seed=config.seed,
        ),
        cache_dir=cache_dir,
        on_progress=progress,
        opened=opened,
    )
    tokenizer = assembled.tokenizer
    return _Maker(
        config,
        build_bulk_engine(assembled),
        assembled.model_config,
        tokenizer,
        chat_frame(tokenizer),
        topics,
        given,
        counts,
        seen,
        progress,
    )


def _make_part(maker: _Maker, folder: Path, kind: str, number: int, count: int) -> int:
    """Makes and writes one part; returns how many conversations it holds."""
    started = time.monotonic()
    prompts = _draw_prompts(maker, kind, number, count)
    if not prompts:
        return 0
    conversations, texts = _answer(maker, kind, number, prompts)
    if kind == TRAIN:
        counts = maker.counts
        counts.conversations += len(conversations)
        counts.tokens += sum(len(c.token_ids) for c in conversations)
        counts.answer_tokens += sum(int(c.supervised.sum()) for c in conversations)
    maker.counts.seconds = round(maker.counts.seconds + time.monotonic() - started, 1)
    # The part last: it is what a later run counts by.
    _write_texts(folder, kind, number, texts)
    save_meta(folder, _meta(maker))
    save_part(folder, kind, number, conversations)
    return len(texts)


def _meta(maker: _Maker) -> dict[str, Any]:
    config, model = maker.config, maker.model
    source = "self-made by the target (Magpie)" if config.prompts is None else "a file"
    return {
        "model": config.model,
        "vocab_size": model.vocab_size,
        "prompts": source,
        "topics": len(maker.topics),
        "sampled_share": config.sampled_share,
        "temperature": config.temperature,
        "followup_share": config.followup_share,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "counts": {name: getattr(maker.counts, name) for name in Counts.__slots__},
    }


def _draw_prompts(maker: _Maker, kind: str, number: int, count: int) -> list[str]:
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


def _fresh(maker: _Maker, texts: Sequence[str], kind: str, count: int) -> list[str]:
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


def _answer(
    maker: _Maker, kind: str, number: int, prompts: list[str]
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
    maker: _Maker, chats: list[Chat], kind: str, what: str, seed: int
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
    maker: _Maker,
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


def _shown(maker: _Maker, what: str) -> OnTokens:
    """Shows on the display how far a stage is."""
    return lambda done, total, tokens: maker.progress(what, done, total)


def _write_texts(folder: Path, kind: str, number: int, texts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)
    write_whole(_texts_path(folder, kind, number), lambda file: file.write(lines.encode()))


def read_texts(folder: Path, kind: str) -> list[str]:
    """The user turns of a kind: those of the parts that are complete."""
    numbers = range(len(parts(folder, kind)))
    return [text for number in numbers for text in read_prompts(_texts_path(folder, kind, number))]


def _texts_path(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}-{number:05d}.prompts.jsonl"
