"""Requests, their sampling parameters and their outputs, under vLLM's names. Host only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any, Self

from jaxspec.checks import check_field_types
from jaxspec.config import MAX_LOGIT_BIAS, MAX_LOGPROBS, ConfigError, check_names
from jaxspec.mode import Mode

DEFAULT_MAX_TOKENS = 16
MAX_SEED = 2**64 - 1
MAX_COPIES = 128
MAX_TEMPERATURE = 1e30  # far beyond it, float32 would allow what is forbidden
MIN_REPETITION_PENALTY = 0.01  # far below it, logits overflow


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


class RequestError(ValueError):
    """A request that cannot be served as asked: what, the value, the limit and the remedy."""


# Fields of vLLM's that have no counterpart: what to do instead.
_REFUSED = {
    "allowed_token_ids": "structured_outputs say what an answer may hold",
    "best_of": "ask for n answers and take the one of the highest cumulative_logprob",
    "extra_args": "there are no plugins that would read them",
    "flat_logprobs": "logprobs come as one dict a token",
    "guided_decoding": "its name is structured_outputs now",
    "logits_processors": "logit_bias, bad_words, penalties and structured_outputs change logits",
    "logprob_token_ids": "logprobs tells of the chosen token and the likeliest ones",
    "output_kind": "LLM.generate gives whole answers, LLM.stream what is new",
    "output_text_buffer_length": "stop strings are held back by as much as they need",
    "prompt_logprob_start": "prompt_logprobs tells of the whole prompt",
    "prompt_logprob_token_ids": "prompt_logprobs tells of the prompt and the likeliest tokens",
    "repetition_detection": "frequency_penalty wears repetition down",
    "routed_experts_prompt_start": "no supported model has experts",
    "skip_clone": "settings never change, so that nobody copies them",
    "skip_reading_prefix_cache": "enable_prefix_caching of the engine is for all requests",
    "spaces_between_special_tokens": "tokens are joined as the tokenizer spells them",
    "stream_interval": "a stream tells of each step as it lands",
    "thinking_token_budget": "enable_thinking=False of LLM.chat leaves thinking out",
    "trace_decode_token_ids": "prompt_logprobs scores a text that is known",
    "truncate_prompt_tokens": "cut the prompt's token ids before they are given",
    "use_beam_search": "ask for n answers",
}


class _ByName:
    """Settings that are given by name; one that is not known is an error that helps."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if args:
            raise RequestError(
                f"{cls.__name__} is given {args[0]!r} without a name; write {cls.__name__}"
                f"({next(iter(cls.__dataclass_fields__))}=...)"
            )
        for name in kwargs:
            if name in _REFUSED:
                raise RequestError(f"{cls.__name__} has no field {name!r}: {_REFUSED[name]}")
        try:
            check_names(f"field of {cls.__name__}", kwargs, list(cls.__dataclass_fields__))
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return super().__new__(cls)


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(_ByName):
    """What the whole answer must be, in vLLM's manner: one of these.

    json: a JSON schema, as text or as a mapping. regex: of Rust's regular expressions. choice: one
    of some texts. grammar: in Lark's notation. json_object: any JSON object.

    Raises:
        RequestError: none of them is given, or several.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        check_field_types(self, RequestError)
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(self._given()) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise RequestError(
                f"structured_outputs has {' and '.join(self._given()) or 'nothing'}; give one of "
                f"{names}"
            )
        if self.choice == ():
            raise RequestError("structured_outputs.choice is empty; give at least one text")

    def _given(self) -> list[str]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_ByName):
    """How to choose and when to stop, in vLLM's manner.

    Raises:
        RequestError: a value is out of range, contradicts another, or names a feature that is
            not supported; nothing is ignored.

    max_tokens None: up to the context length; an answer ends there, too, where the context has no
    room for max_tokens behind the prompt. detokenize False: token ids alone, without text. n,
    logprobs, prompt_logprobs and detokenize change what comes back, not the tokens of one answer,
    and logit_bias is no text, so the command line has none of them.
    """

    temperature: float = _option(1.0, "0 takes the likeliest token, higher varies more")
    top_k: int = _option(0, "sample among the k likeliest tokens only; 0 or -1: off")
    top_p: float = _option(1.0, "sample among the likeliest tokens of this probability in all")
    min_p: float = _option(0.0, "drop tokens below this share of the likeliest one's probability")
    seed: int | None = _option(None, "the same seed gives the same text, whatever the drafter")
    max_tokens: int | None = _option(DEFAULT_MAX_TOKENS, "tokens to generate at most")
    stop: tuple[str, ...] = _option((), "text that ends the answer")
    stop_token_ids: tuple[int, ...] = _option((), "token id that ends the answer")
    ignore_eos: bool = _option(False, "go on after the model's own end")
    include_stop_str_in_output: bool = _option(False, "keep the stop text in the answer")
    skip_special_tokens: bool = _option(True, "leave control tokens out of the text")
    presence_penalty: float = _option(0.0, "taken off the logits of tokens already put out")
    frequency_penalty: float = _option(0.0, "taken off as often as the token was put out")
    repetition_penalty: float = _option(
        1.0, "divides the logits of tokens of prompt and answer (negative ones: multiplies)"
    )
    min_tokens: int = _option(0, "tokens before which nothing ends the answer")
    bad_words: tuple[str, ...] = _option((), "text that the answer never holds")
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    n: int = 1  # answers to the prompt
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.bad_words, str):
            object.__setattr__(self, "bad_words", (self.bad_words,))
        lists = ("stop", "stop_token_ids", "bad_words")
        for name in lists:
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_field_types(self, RequestError)
        for name in lists:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}; it must be -1 or 0 (off) or at least 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must be between 0 and {MAX_SEED}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens}; it must be at least 1, or None for as many as "
                "the context holds"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string; each stop string needs a character")
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop is {self.stop!r}, which is found in text, but detokenize is False; leave "
                "out the one or the other, or give stop_token_ids"
            )
        self._check_edits()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(
                    f"{name} is {count}; it must be between 0 and {MAX_LOGPROBS}, or None for none"
                )
        self._check_structure()
        if not 1 <= self.n <= MAX_COPIES:
            raise RequestError(f"n is {self.n}; it must be between 1 and {MAX_COPIES}")
        if self.n > 1 and self.greedy:
            raise RequestError(
                f"n is {self.n}, but temperature 0 makes all copies equal; raise temperature or "
                "leave n at 1"
            )

    def _check_structure(self) -> None:
        """Refuses what contradicts a grammar, which alone says when an answer is whole."""
        asked = self.structured_outputs
        if asked is None:
            return
        if not isinstance(asked, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs is {asked!r}; give StructuredOutputsParams, or None"
            )
        for name, neutral in (("ignore_eos", False), ("min_tokens", 0)):
            if getattr(self, name) != neutral:
                raise RequestError(
                    f"{name} is {getattr(self, name)}, but structured_outputs say where the "
                    f"answer ends; leave {name} at {neutral}"
                )

    def _check_edits(self) -> None:
        """Refuses what cannot be meant by the fields that change logits."""
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; lower the "
                "one or raise the other"
            )
        if any(not word.strip() for word in self.bad_words):
            raise RequestError("bad_words holds a blank string; each needs a visible character")
        if len(self.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are "
                "possible"
            )
        for token, bias in (self.logit_bias or {}).items():
            _check_range(f"logit_bias of token {token}", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True where the highest logit is taken, whatever the filters say."""
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """True where the target's logits are changed before a token is chosen."""
        return bool(
            (self.presence_penalty, self.frequency_penalty) != (0.0, 0.0)
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
        )

    @property
    def mode(self) -> Mode:
        """The least mode of a batch that serves these settings."""
        if self.structured_outputs is not None:
            return Mode.CONSTRAINED
        if self.logprobs is not None:
            return Mode.LOGPROBS
        if self.edits_logits:
            return Mode.EDITED
        return Mode.GREEDY if self.greedy else Mode.SAMPLED

    @property
    def prefill_mode(self) -> Mode:
        """As `mode`, of the prefill."""
        return self.mode if self.prompt_logprobs is None else Mode.PROMPT_LOGPROBS


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Refuses NaN, infinities and values outside [low, high] (or (low, high])."""
    too_low = value <= low if open_low else value < low
    if too_low or not value <= high:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise RequestError(
            f"{name} is {value!r}; it must be a finite number, {bound} and at most {high:g}"
        )


def sampling_params_fields() -> dict[str, str]:
    """Names of the SamplingParams fields and their annotated types."""
    return {f.name: str(f.type) for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it.

    copy_index: which of several answers to it. is_watched: False where nobody reads the answer
    before its end, which costs the host less: the engine tells of it once, when it is over.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    copy_index: int = 0
    is_watched: bool = True


@dataclass(slots=True)
class RequestMetrics:
    """Raw counts and times of one request; times are `time.perf_counter` seconds."""

    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    num_verifies: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_committed: int = 0  # in decode steps: the token of the prefill is not counted
    accept_lengths: list[int] = field(default_factory=list)  # one entry a verify
    num_preemptions: int = 0  # times that its pages went to requests that came before

    def count_verify(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Adds a verify."""
        self.num_verifies += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted += num_accepted
        self.num_committed += num_committed
        self.accept_lengths.append(num_accepted + 1)

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens a verify, bonus included; None before the first verify."""
        if not self.num_verifies:
            return None
        return 1.0 + self.num_accepted / self.num_verifies

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token seen by the host."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position: by the model's own logits, before temperature and edits.

    rank: 1 of the likeliest. decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """The text and tokens of one completion so far."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # a token: itself, then the likeliest
    cumulative_logprob: float | None = None  # of all tokens, where logprobs were asked for


@dataclass(slots=True)
class RequestOutput:
    """A request as its caller sees it, cumulative; `outputs` has `SamplingParams.n` entries.

    num_cached_tokens: prompt tokens whose KV the prefix cache had. prompt_logprobs: an entry a
    token of the prompt, None for the first, where they were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
