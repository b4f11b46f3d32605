"""What the user says about a training run. Host only."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields
from typing import Any

from jaxspec.config import ConfigError

WEIGHTINGS = ("decay", "dpace")
_CHOICES = {
    "loss": WEIGHTINGS,
    "dtype": ("auto", "float32", "bfloat16"),
    "attention": ("auto", "xla", "cudnn"),
}
EPOCHS = 6  # where neither steps nor minutes are given, as the paper trains


class TrainingError(ConfigError):
    """Data or a run that cannot be used: what, the value, the limit and the remedy."""


def option(default: Any, help: str) -> Any:
    """A field of settings that is an option of the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of `jaxspec train`; None means "decide"."""

    data: str | None = option(None, "folder made by `jaxspec train data`")
    output: str | None = option(None, "folder for the drafter, its metrics and its checkpoints")
    model: str = option("smollm2-135m", "target: alias, folder, repo id or .gguf file")
    num_layers: int = option(3, "decoder layers of the drafter")
    block_size: int = option(8, "tokens of a block: the bonus token and the drafts")
    num_features: int = option(5, "target layers whose outputs the drafter reads")
    mask_token_id: int | None = option(
        None, "token that stands for a draft not made yet; unset: a token the data never uses"
    )
    loss: str = option("dpace", "weights of the slots: decay or dpace")
    gamma: float | None = option(None, "of the decay; unset: the paper's for the block size")
    soft_labels: float = option(
        0.5, "share of the loss taken against the target's whole distribution, 0 to 1"
    )
    row_len: int = option(1024, "tokens of a packed row; longer conversations lose their end")
    batch_rows: int = option(32, "rows of an optimiser step")
    num_anchors: int = option(128, "blocks drawn from each row of a step")
    micro_batch: int | None = option(None, "rows at once; unset: as many as memory holds")
    learning_rate: float = option(6e-4, "peak of the cosine")
    warmup: float = option(0.04, "share of the steps in which the learning rate rises")
    weight_decay: float = option(0.0, "of the matrices")
    clip: float = option(1.0, "largest norm of a gradient")
    ema: float = option(
        0.0, "decay of a running mean of the weights, which is what is written; 0: the weights"
    )
    init_from: str | None = option(
        None, "checkpoint folder of a drafter of this shape to start from; unset: fresh weights"
    )
    max_steps: int | None = option(None, "optimiser steps")
    max_minutes: float | None = option(
        None, "wall time, compiling included; the schedule is fitted to it"
    )
    dtype: str = option("auto", "to compute in: auto, float32 or bfloat16")
    attention: str = option("auto", "of the target: auto, xla or cudnn")
    measure_every: int = option(250, "steps between measurements on held-out rows")
    save_minutes: float = option(2.0, "wall time between checkpoints")
    seed: int = option(0, "of weights, row order and anchors")
    resume: bool = option(False, "go on from the last checkpoint in output")
    dry_run: bool = option(False, "print what a run would need, and stop")

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_features", "batch_rows", "num_anchors", "measure_every"):
            at_least(name, getattr(self, name), 1)
        at_least("block_size", self.block_size, 2)
        at_least("row_len", self.row_len, 2)
        for name in ("micro_batch", "max_steps"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.micro_batch is not None and self.batch_rows % self.micro_batch:
            raise TrainingError(
                f"micro_batch is {self.micro_batch}, which does not divide batch_rows "
                f"{self.batch_rows}; choose a divisor"
            )
        if self.num_anchors > self.row_len:
            raise TrainingError(
                f"num_anchors is {self.num_anchors}, but a row has {self.row_len} tokens; lower it"
            )
        for name in ("learning_rate", "clip", "save_minutes", "gamma", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise TrainingError(f"{name} is {value}; it must be above 0")
        for name in ("warmup", "soft_labels"):
            if not 0 <= getattr(self, name) <= 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 <= self.ema < 1:
            raise TrainingError(f"ema is {self.ema}; it must be at least 0 and below 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise TrainingError(f"weight_decay is {self.weight_decay}; it must be at least 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise TrainingError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainConfig(TrainConfig):
    """Settings of `jaxspec train eagle3`; None means "decide".

    `num_layers` and `mask_token_id` mean nothing here: the drafter has one layer and no masks. It
    always starts from fresh weights.
    """

    block_size: int = option(8, "tokens of a chain: the bonus token and the drafts unrolled")
    num_features: int = option(3, "target layers whose outputs the drafter reads")
    draft_vocab_size: int | None = option(
        None, "the likeliest tokens of the data, from which alone is drafted; unset: 16000 or all"
    )
    loss: str = option("decay", "weights of the drafts: decay or dpace")
    # exp(-1 / 4.48) = 0.8, EAGLE-3's weight of each further draft.
    gamma: float | None = option(4.48, "of the decay")
    soft_labels: float = option(
        1.0, "share of the loss taken against the target's whole distribution, 0 to 1"
    )
    clip: float = option(0.5, "largest norm of a gradient")

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.draft_vocab_size is not None:
            at_least("draft_vocab_size", self.draft_vocab_size, 1)


NOT_OF_EAGLE3 = ("num_layers", "mask_token_id", "init_from")


def resume_command(config: TrainConfig) -> str:
    """The command line that goes on with a run."""
    words = ["jaxspec", "train", *(["eagle3"] if isinstance(config, Eagle3TrainConfig) else [])]
    for each in fields(config):
        value = getattr(config, each.name)
        if value != each.default and each.name not in ("resume", "dry_run"):
            words += ["--" + each.name.replace("_", "-"), str(value)]
    return shlex.join([*words, "--resume"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Settings of `jaxspec train data`; None means "decide"."""

    output: str | None = option(None, "folder for the data; one that holds some is gone on with")
    model: str = option("smollm2-135m", "target: alias, folder, repo id or .gguf file")
    prompts: str | None = option(
        None, "user turns: a text file with one a line, or .jsonl; unset: the target makes them"
    )
    topics: str | None = option(
        None, "words for the target's own prompts, one a line, or WordNet's index.noun"
    )
    num_prompts: int = option(4096, "prompts to answer at most")
    num_held_out: int = option(256, "of them kept to measure on, about other topics")
    max_prompt_tokens: int = option(160, "longer user turns are left out")
    max_tokens: int = option(512, "of an answer")
    sampled_share: float = option(0.3, "of the answers that are sampled; the others are greedy")
    temperature: float = option(0.8, "of the sampled ones")
    followup_share: float = option(0.15, "of the conversations that get a second turn")
    max_num_seqs: int | None = option(
        None, "answers written at once; unset: 32 on a CPU, 1024 on a GPU, fewer where memory ends"
    )
    part_size: int = option(8192, "prompts whose conversations are written to disk at once")
    max_minutes: float | None = option(None, "no conversation is begun after so much wall time")
    dtype: str = option("auto", "of the target: auto, float32, bfloat16 or float16")
    kernels: str = option("auto", "auto, xla or triton: implementation of every kernel op")
    seed: int = option(0, "of topics, turns and answers")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_prompt_tokens", "max_tokens", "part_size"):
            at_least(name, getattr(self, name), 1)
        if self.max_num_seqs is not None:
            at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("num_held_out", self.num_held_out, 0)
        for name in ("sampled_share", "followup_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise TrainingError(f"max_minutes is {self.max_minutes}; it must be above 0")
        if self.num_held_out >= self.num_prompts:
            raise TrainingError(
                f"num_held_out is {self.num_held_out}, which leaves nothing of num_prompts "
                f"{self.num_prompts} to train on; lower it"
            )


def at_least(name: str, value: int, low: int) -> None:
    """Raises TrainingError for a value that is too low."""
    if value < low:
        raise TrainingError(f"{name} is {value}; it must be at least {low}")
