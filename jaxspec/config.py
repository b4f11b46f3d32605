"""What the user says (`EngineConfig`) and what was decided from it (`Geometry`). Host only.

Dimension letters, the same everywhere: S slots, B rows of a batch, T tokens of a prefill tile,
K draft tokens, N = K + 1, P pages, G tokens per page, M pages per slot, L layers, H query heads,
J KV heads, D head size, E model width, F feature layers, V vocabulary.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from jaxspec.checks import check_field_types
from jaxspec.mode import Mode

MAX_STOP_IDS = 16
MAX_LOGPROBS = 20  # likeliest tokens a position, as the OpenAI API allows
MAX_LOGIT_BIAS = 300  # entries, as the OpenAI API allows
MAX_BAD_WORDS = 64  # token sequences
MAX_BAD_WORD_LEN = 8  # tokens of each
MAX_BLOCK_SIZE = 64
ACCEPT_RULES = ("keyed", "rejection")
DRAFT_NOISE = ("keyed", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_MAX_UNROLL = 4  # a body is compiled for each of them
_STEPS_OF_SMALL_MODELS = 4
_SMALL_MODEL_BYTES = 1 << 30
_CPU_KV_BYTES = 1 << 30  # host memory is shared with everything else; more only when asked for


class ConfigError(ValueError):
    """A setting that cannot be met: what, the value, the limit and the remedy."""


def _option(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, under vLLM's names where vLLM has them; None means "decide"."""

    model: str = _option("smollm2-135m", "alias, folder, Hugging Face repo id or .gguf file")
    drafter: str = _option(
        "auto", "auto, none, ngram, or a drafter checkpoint (folder or Hugging Face repo id)"
    )
    revision: str | None = _option(None, "revision of the Hugging Face repo")
    dtype: str = _option("auto", "weights and KV: auto, float32, bfloat16 or float16")
    max_model_len: int | None = _option(None, "tokens of prompt and output at most")
    max_num_seqs: int = _option(8, "requests that run at once")
    max_num_batched_tokens: int = _option(
        1024, "prompt tokens a prefill step takes: what running requests wait for at most"
    )
    enable_chunked_prefill: bool = _option(
        True, "let requests decode between the pieces of longer prompts; false: prompts go first"
    )
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory to use")
    kv_cache_tokens: int | None = _option(None, "size of the KV pool in tokens")
    enable_prefix_caching: bool = _option(
        True, "keep the KV of past texts for prompts that begin alike"
    )
    page_size: int | None = _option(None, "tokens a KV page holds, a power of two")
    block_size: int | None = _option(
        None, "tokens a chain of drafts takes, bonus token included; not above the trained size"
    )
    tree_nodes: int | None = _option(
        None, "draft a tree of this many tokens, bonus token included, in place of a chain"
    )
    tree_topk: int | None = _option(
        None, "drafts behind a token of the tree at most; as many as do well if not said"
    )
    ngram_max: int = _option(4, "longest n-gram that the ngram drafter looks up")
    adaptive: bool = _option(
        True, "verify fewer drafts, or none, where measured step times say that it is faster"
    )
    draft_noise: str = _option(
        "keyed",
        "keyed: drafts are sampled with the noise that the model's own choice will have; none: "
        "drafts are the likeliest tokens at any temperature, and fewer of them are right",
    )
    draft_window: int | None = _option(None, "committed tokens that the drafter sees at most")
    decode_steps: int | None = _option(
        None,
        "decode steps in one dispatch, when nobody waits; by default 4 for weights below 1 GiB on "
        "a GPU without trees, else 1",
    )
    warm_up: tuple[str, ...] = _option(
        ("greedy", "sampled"),
        "compile before serving: greedy, sampled, edited (penalties, bias, min_tokens, bad "
        "words), logprobs, prompt_logprobs; others compile when first asked for",
    )
    overlap: bool = _option(True, "dispatch a step before the result of the last is known")
    kernels: str = _option("auto", "auto, xla or triton: implementation of every kernel op")
    seed: int = _option(0, "seed of requests that name none")
    accept_rule: str = _option(
        "keyed",
        "keyed: the text is that of plain decoding; rejection: sampled text is distributed as "
        "plain decoding's, and more drafts are accepted",
    )
    force_accept: int | None = _option(
        None, "for benchmarks: accept this many drafts whatever the target says (not lossless)"
    )
    poison: bool = _option(False, "debug: mark relay rows once read, so that stale reads show")

    def __post_init__(self) -> None:
        check_field_types(self, ConfigError)
        _choice("dtype", self.dtype, DTYPES)
        _choice("accept_rule", self.accept_rule, ACCEPT_RULES)
        _choice("draft_noise", self.draft_noise, DRAFT_NOISE)
        if self.accept_rule == "rejection" and self.tree_nodes is not None:
            raise ConfigError(
                "accept_rule is 'rejection', which takes drafts one behind the other, but "
                f"tree_nodes is {self.tree_nodes}; leave out the one or the other"
            )
        for name in self.warm_up:
            _choice("warm_up", name, tuple(mode.name.lower() for mode in Mode))
        object.__setattr__(self, "warm_up", tuple(self.warm_up))
        for name in ("max_num_seqs", "max_num_batched_tokens", "ngram_max"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_tokens", "draft_window", "decode_steps"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.block_size is not None:
            _at_least("block_size", self.block_size, 2)
            if self.block_size > MAX_BLOCK_SIZE:
                raise ConfigError(
                    f"block_size is {self.block_size}; it must be at most {MAX_BLOCK_SIZE}, what "
                    "the kernels take"
                )
        _check_tree(self.tree_nodes, self.tree_topk)
        if self.force_accept is not None:
            _at_least("force_accept", self.force_accept, 0)
        _at_least("seed", self.seed, 0)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and "
                "at most 1"
            )
        if self.page_size is not None and not (
            self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0
        ):
            raise ConfigError(f"page_size is {self.page_size}; it must be a power of two")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Builds a config from keyword arguments; an unknown name is an error that helps."""
        check_names("option", kwargs, [f.name for f in fields(cls)])
        return cls(**kwargs)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation of each kernel op, decided once at start."""

    resolve_prepare: str = "xla"
    accept: str = "xla"
    accept_tree: str = "xla"
    paged_attention: str = "xla"
    kv_write: str = "xla"
    kv_write_context: str = "xla"
    kv_move: str = "xla"
    few_row_gemm: str = "xla"
    add_rms_norm: str = "xla"
    filter_thresholds: str = "xla"
    early_launch: bool = False  # see `kernels_pallas.early_launch`


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Every static size and choice of a running engine; no field is open. Hashable."""

    vocab_size: int
    num_slots: int  # S
    num_pages: int  # P, the null page included
    page_size: int  # G
    pages_per_slot: int  # M
    max_model_len: int
    block_size: int  # N
    prefill_tile: int  # T
    prefill_buckets: tuple[int, ...]  # tiles a prefill step takes
    max_num_batched_tokens: int  # prompt tokens it takes
    batch_buckets: tuple[int, ...]  # rows a decode step takes
    decode_steps: int  # k
    loop_unroll: int = 1  # of these steps stand in the body of the loop, a divisor of k
    chunked_prefill: bool = True
    max_stop_ids: int = MAX_STOP_IDS
    dtype: str = "float32"
    kernels: Kernels = Kernels()
    accept_rule: str = "keyed"
    draft_noise: str = "keyed"
    force_accept: int | None = None
    poison: bool = False

    @property
    def max_commit(self) -> int:
        """Rows of KV that one dispatch can add to a request."""
        return self.block_size * self.decode_steps

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` rows of KV."""
        return -(-num_tokens // self.page_size)

    def pages_at_most(self, max_len: int) -> int:
        """Pages that a request of `max_len` tokens in all may come to own."""
        return self.pages_for(max_len + 2 * self.max_commit)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the choice of sizes depends on."""

    platform: str  # "cpu" | "gpu"
    memory_bytes: int | None  # what the device can hold in all; None where unknown


def resolve(
    config: EngineConfig,
    *,
    vocab_size: int,
    model_max_len: int,
    block_size: int,
    kv_bytes_per_token: int,
    weight_bytes: int,
    dtype: str,
    kernels: Kernels,
    device: DeviceFacts,
    tree_depth: int | None = None,
) -> Geometry:
    """Decides every open size.

    tree_depth: drafts on a path of the drafter's trees at most; None where it drafts chains.
    kv_bytes_per_token: of all layers of target and drafter. weight_bytes: of both.

    Raises:
        ConfigError: the settings contradict the model or the memory.
    """
    check_model_len(config, model_max_len)
    max_model_len = config.max_model_len or model_max_len
    most_drafts = block_size - 1 if tree_depth is None else tree_depth
    if config.force_accept is not None and config.force_accept > most_drafts:
        kind = f"a block of {block_size}" if tree_depth is None else "a path of the tree"
        raise ConfigError(
            f"force_accept is {config.force_accept}, but {kind} holds {most_drafts} drafts; "
            "lower it"
        )
    on_gpu = device.platform == "gpu"
    page_size = config.page_size or (64 if on_gpu else 32)
    prefill_tile = 64 if on_gpu else 16
    decode_steps = config.decode_steps or _decode_steps(on_gpu and tree_depth is None, weight_bytes)
    pages_per_slot = -(-(max_model_len + 2 * block_size * decode_steps) // page_size)
    num_pages = 1 + _pool_pages(
        config,
        pages_per_slot=pages_per_slot,
        page_size=page_size,
        page_bytes=kv_bytes_per_token * page_size,
        weight_bytes=weight_bytes,
        device=device,
    )
    return Geometry(
        vocab_size=vocab_size,
        num_slots=config.max_num_seqs,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_slot=pages_per_slot,
        max_model_len=max_model_len,
        block_size=block_size,
        prefill_tile=prefill_tile,
        prefill_buckets=_powers_of_two(-(-config.max_num_batched_tokens // prefill_tile)),
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        batch_buckets=_powers_of_two(config.max_num_seqs),
        decode_steps=decode_steps,
        loop_unroll=_loop_unroll(decode_steps) if on_gpu else 1,
        dtype=dtype,
        kernels=kernels,
        accept_rule=config.accept_rule,
        draft_noise=config.draft_noise,
        force_accept=config.force_accept,
        poison=config.poison,
    )


def _decode_steps(is_chain_on_gpu: bool, weight_bytes: int) -> int:
    """Steps in a dispatch where the settings leave it open.

    A step of a small model is over before a GPU's host has launched the next: SmolLM2-135M brings
    10,000 tokens a second on an H200 by fours and 6,800 by ones, eight requests at once
    (kernels_pallas/NOTES.md). Where reading the weights takes longer than that, ones lose nothing,
    and are heard of sooner. A step of a tree has so many launches that four of them compile for a
    minute.
    """
    is_small = weight_bytes < _SMALL_MODEL_BYTES
    return _STEPS_OF_SMALL_MODELS if is_chain_on_gpu and is_small else 1


def _loop_unroll(decode_steps: int) -> int:
    """Steps in the body of a GPU's loop: a turn of a loop costs it 0.1 ms, 15 % of a small step.

    The host reads after each turn whether there is another. Inside a command buffer, where it need
    not, a turn took twice as long as a step (kernels_pallas/NOTES.md).
    """
    return max(size for size in range(1, _MAX_UNROLL + 1) if decode_steps % size == 0)


def check_model_len(config: EngineConfig, model_max_len: int) -> None:
    """Raises ConfigError for a max_model_len beyond the positions that the model knows."""
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at "
            f"{model_max_len}; lower it"
        )


def _pool_pages(
    config: EngineConfig,
    *,
    pages_per_slot: int,
    page_size: int,
    page_bytes: int,
    weight_bytes: int,
    device: DeviceFacts,
) -> int:
    """Pages that requests can own: as many as all slots can use, or as memory allows."""
    wanted = config.max_num_seqs * pages_per_slot
    if config.kv_cache_tokens is not None:
        pages = -(-config.kv_cache_tokens // page_size)
        limit = f"kv_cache_tokens {config.kv_cache_tokens}"
    elif device.memory_bytes is not None and device.platform == "gpu":
        budget = int(device.memory_bytes * config.gpu_memory_utilization) - weight_bytes
        pages = max(budget, 0) // page_bytes
        limit = (
            f"{max(budget, 0) / 1e9:.2f} GB beside the weights "
            f"(gpu_memory_utilization {config.gpu_memory_utilization})"
        )
    else:
        pages = max(_CPU_KV_BYTES // page_bytes, pages_per_slot)
        limit = "the host"
    pages = min(pages, wanted)
    if pages < pages_per_slot:
        raise ConfigError(
            f"one request of max_model_len needs {pages_per_slot} KV pages of {page_size} tokens, "
            f"but {limit} gives {pages}; lower max_model_len or raise that limit"
        )
    return pages


def _powers_of_two(at_least: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the first that is at least `at_least`."""
    return tuple(1 << i for i in range((at_least - 1).bit_length() + 1))


def check_names(kind: str, given: Iterable[str], known: list[str]) -> None:
    """Raises ConfigError for the first unknown name, with the nearest known one."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown {kind} {name!r}; {hint}")


def _check_tree(num_nodes: int | None, topk: int | None) -> None:
    if topk is not None:
        _at_least("tree_topk", topk, 1)
        if num_nodes is None:
            raise ConfigError(
                f"tree_topk is {topk}, but tree_nodes is not set; say how many tokens a tree has"
            )
    if num_nodes is None:
        return
    _at_least("tree_nodes", num_nodes, 2)
    if num_nodes > MAX_BLOCK_SIZE:
        raise ConfigError(
            f"tree_nodes is {num_nodes}; it must be at most {MAX_BLOCK_SIZE}, what the kernels take"
        )


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
