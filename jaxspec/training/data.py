"""Makes training data without a hub: the target answers prompts, its own or the user's."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench.prompts import PROMPTS
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import assemble, open_model
from jaxspec.training.bulk import build_bulk
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
from jaxspec.training.filters import SharedText, text_key
from jaxspec.training.maker import Counts, Maker, Part, make_parts
from jaxspec.training.plan import free_memory
from jaxspec.training.prompts import (
    chat_frame,
    read_prompts,
    read_topics,
)
from jaxspec.weights.files import Progress, no_progress

_SEQS = {"gpu": 1024}  # answers at once; enough that a step reads more KV than weights
_DECODE_STEPS = {"gpu": 8}  # in one dispatch: a text that ends leaves its slot empty until then
_FRAME_TOKENS = 96  # that a chat template may add


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
    writer = _Writer(maker, folder)
    if config.num_held_out and not parts(folder, HELD_OUT):
        for part in make_parts(maker, HELD_OUT, config.num_held_out):
            writer.write(HELD_OUT, part)
    writer.wait()
    held_out = read_texts(folder, HELD_OUT)
    kept_apart = held_out + [prompt.text for prompt in PROMPTS]
    maker.seen.update(text_key(text) for text in held_out)
    maker.shared = SharedText(
        (text, maker.tokenizer.encode(text, add_special_tokens=False)) for text in kept_apart
    )
    left = config.num_prompts - config.num_held_out - len(read_texts(folder, TRAIN))
    until = float("inf") if config.max_minutes is None else started + 60 * config.max_minutes
    if left > 0 and time.monotonic() < until:
        number = len(parts(folder, TRAIN))
        for part in make_parts(maker, TRAIN, left, number=number, until=until):
            writer.write(TRAIN, part)
    writer.wait()
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
) -> Maker:
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
            max_num_seqs=1,  # of the engine, whose parts are used at another size
            max_num_batched_tokens=8192,
            max_model_len=min(longest, opened.checkpoint.config.max_position_embeddings),
            seed=config.seed,
        ),
        cache_dir=cache_dir,
        on_progress=progress,
        opened=opened,
    )
    tokenizer, platform = assembled.tokenizer, jax.default_backend()
    bulk = build_bulk(
        assembled,
        num_slots=config.max_num_seqs or _SEQS.get(platform, 32),
        decode_steps=_DECODE_STEPS.get(platform, 1),
        free_bytes=free_memory(platform),
    )
    return Maker(
        config,
        bulk,
        assembled.model_config,
        tokenizer,
        chat_frame(tokenizer),
        topics,
        given,
        counts,
        seen,
        progress,
    )


class _Writer:
    """Writes parts beside the target's work: to pack one takes half a second."""

    def __init__(self, maker: Maker, folder: Path):
        self._maker, self._folder = maker, folder
        self._numbers = {kind: len(parts(folder, kind)) for kind in (TRAIN, HELD_OUT)}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._begun = time.monotonic()

    def write(self, kind: str, part: Part) -> None:
        """Counts a part and begins to write it, once the one before is written.

        Raises:
            TrainingError: that one could not be written.
        """
        self.wait()
        maker, number, now = self._maker, self._numbers[kind], time.monotonic()
        self._numbers[kind] += 1
        counts, seconds = maker.counts, now - self._begun
        counts.seconds, self._begun = round(counts.seconds + seconds, 1), now
        if kind == TRAIN:
            num_tokens = sum(len(c.token_ids) for c in part.conversations)
            counts.conversations += len(part.conversations)
            counts.tokens += num_tokens
            counts.answer_tokens += sum(int(c.supervised.sum()) for c in part.conversations)
            maker.pace = f", part {number} at {num_tokens / seconds:.0f} tokens/s"
        meta = _meta(maker)

        def save() -> None:
            # The part last: it is what a later run counts by.
            _write_texts(self._folder, kind, number, part.prompts)
            save_meta(self._folder, meta)
            save_part(self._folder, kind, number, part.conversations)

        self._pending = self._thread.submit(save)

    def wait(self) -> None:
        """Until what was begun is written.

        Raises:
            TrainingError: it could not be.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def _meta(maker: Maker) -> dict[str, Any]:
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


def _write_texts(folder: Path, kind: str, number: int, texts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)
    write_whole(_texts_path(folder, kind, number), lambda file: file.write(lines.encode()))


def read_texts(folder: Path, kind: str) -> list[str]:
    """The user turns of a kind: those of the parts that are complete."""
    numbers = range(len(parts(folder, kind)))
    return [text for number in numbers for text in read_prompts(_texts_path(folder, kind, number))]


def _texts_path(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}-{number:05d}.prompts.jsonl"
