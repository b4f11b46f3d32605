"""A request while the engine serves it. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from jaxspec.engine.draft_record import DraftRecord
from jaxspec.grammar import Matcher
from jaxspec.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
)

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class Detokenizer(Protocol):
    """Turns token ids into text piece by piece; never hands out half a character."""

    def push(self, token_ids: list[int], /) -> str:
        """Adds tokens and returns the text that has become certain."""

    def flush(self) -> str:
        """Returns what is left at the end."""


class TextCodec(Protocol):
    """What the engine asks of a tokenizer beside detokenizers."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Text of token ids."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What the host knows of a request; times and counts live in `metrics`."""

    request: Request
    max_len: int  # tokens of prompt and output at most
    limits_row: np.ndarray  # `pack_limits`
    metrics: RequestMetrics
    prefill_ids: np.ndarray  # i32[L] the prompt, and the output so far of one that was preempted
    stop_ids: frozenset[int] = frozenset()  # the token ids that end it, EOS included
    detokenizer: Detokenizer | None = None  # None where nothing more will be said
    matcher: Matcher | None = None  # what a grammar allows behind `output_ids`
    edits_row: np.ndarray | None = None  # `pack_edits`; None where logits are left as they are
    slot: int = 0  # 0: waits
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0  # of `prefill_ids`: tokens whose KV was in the prefix cache
    num_prefilled: int = 0  # of `prefill_ids`: tokens dispatched, or cached
    num_in_flight: int = 0  # dispatches whose result has not landed
    is_preempted: bool = False  # another `Sequence` goes on with the request
    num_cached_tokens: int | None = None  # of the prompt, when it first ran
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # where asked for
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # the first has none
    text: str = ""  # of the tokens that were put into it, see `catch_up`
    num_told: int = 0  # of `output_ids`: tokens that `text` holds, or its detokenizer holds back
    num_searched_chars: int = 0  # of `text`: no stop string that counts ends among them
    total_logprob: float = 0.0  # of the first `num_added` tokens
    num_added: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    draft_record: DraftRecord = field(default_factory=DraftRecord)

    @property
    def prefill_len(self) -> int:
        """Tokens to prefill before the next one is known."""
        return len(self.prefill_ids)

    @property
    def token_ids(self) -> list[int]:
        """The text so far: prompt and output."""
        return [*self.request.prompt_token_ids, *self.output_ids]

    @property
    def finished(self) -> bool:
        """True once nothing more will be emitted."""
        return self.finish_reason is not None

    @property
    def is_over(self) -> bool:
        """True once results that land for it are dropped."""
        return self.finished or self.is_preempted

    @property
    def needs_host(self) -> bool:
        """True where the host must see each result before the next step can be planned whole."""
        return self.needs_host_stop or self.matcher is not None

    @property
    def needs_host_stop(self) -> bool:
        """True where only the host can see the end: stop strings."""
        return bool(self.request.params.stop)

    def catch_up(self) -> None:
        """Puts the tokens that came since the last time into `text`, all of them at once."""
        if self.detokenizer is None:
            return
        if self.num_told < len(self.output_ids):
            new = self.output_ids[self.num_told :]
            self.text += self.detokenizer.push([id_ for id_ in new if id_ not in self.stop_ids])
            self.num_told = len(self.output_ids)
        if self.finish_reason in _WHOLE:
            self.text += self.detokenizer.flush()
            self.detokenizer = None

    def settled_text(self) -> str:
        """The text that no later token can take back.

        A running request holds back what may be the beginning of a stop string.
        """
        self.catch_up()
        stop = self.request.params.stop
        if self.finished or not stop:
            return self.text
        longest = max(len(text) for text in stop) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(text.startswith(tail) for text in stop):
                return self.text[:-size]
        return self.text

    def output(self) -> RequestOutput:
        """The request as its caller sees it now."""
        params, logprobs, total = self.request.params, None, None
        if params.logprobs is not None:
            logprobs, total = list(self.logprobs), self._add_up_logprobs()
        completion = CompletionOutput(
            0,
            self.settled_text(),
            list(self.output_ids),
            self.finish_reason,
            self.stop_reason,
            logprobs,
            total,
        )
        of_prompt = None if params.prompt_logprobs is None else [None, *self.prompt_logprobs]
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            [completion],
            self.finished,
            self.metrics,
            self.error,
            self.num_cached_tokens or 0,
            of_prompt,
        )

    def _add_up_logprobs(self) -> float:
        for place in range(self.num_added, len(self.output_ids)):
            self.total_logprob += self.logprobs[place][self.output_ids[place]].logprob
        self.num_added = len(self.output_ids)
        return self.total_logprob

    def preempt(self) -> Sequence:
        """Retires this one and returns the one that will go on from what has landed.

        The text goes on as it would have: the noise of a token depends on its position alone.
        """
        self.catch_up()  # both share a detokenizer, which must not be told the same tokens twice
        self.is_preempted = True
        return replace(
            self,
            prefill_ids=np.asarray(self.token_ids, np.int32),
            slot=0,
            pages=[],
            num_cached=0,
            num_prefilled=0,
            num_in_flight=0,
            is_preempted=False,
        )
