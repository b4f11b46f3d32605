"""Which tokens a JSON schema, a regular expression or a grammar allows next. Host only.

The work is done by `llguidance` (pip install -e '.[grammar]'), which is imported when it is
first asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.request import RequestError, StructuredOutputsParams

ALL = np.uint32(0xFFFFFFFF)
_DEAD_END = "NoExtensionBias"  # llguidance's word for a text that no token can go on


class Grammars:
    """Makes matchers for a tokenizer."""

    def __init__(self, make_tokenizer: Callable[[], Any]):
        """make_tokenizer: gives the `llguidance.LLTokenizer`, which takes a second or so."""
        self._make_tokenizer = make_tokenizer
        self._tokenizer: Any = None

    @classmethod
    def of_vocabulary(
        cls, to_json: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Grammars:
        """to_json: gives the tokenizer as the `tokenizers` package writes it."""

        def make() -> Any:
            import llguidance

            return llguidance.LLTokenizer(
                to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )

        return cls(make)

    def matcher(self, asked: StructuredOutputsParams) -> Matcher:
        """Begins a text.

        Raises:
            RequestError: llguidance is missing, or does not understand the grammar.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                f"structured_outputs asks for {asked.kind}, which needs llguidance; "
                "pip install -e '.[grammar]'"
            ) from None
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        try:
            grammar = _grammar_of(asked, LLMatcher)
        except (TypeError, ValueError) as error:
            raise _refusal(asked, str(error)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some are found out here alone
        if matcher.is_error():
            raise _refusal(asked, matcher.get_error())
        return Matcher(matcher)


def _grammar_of(asked: StructuredOutputsParams, matcher: Any) -> str:
    if asked.regex is not None:
        return matcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return matcher.grammar_from_lark(asked.grammar)
    if asked.choice is not None:
        # A terminal: the alternatives of a rule are followed one by one, 2,000 of them at most.
        texts = " | ".join(map(json.dumps, asked.choice))
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    schema = {"type": "object"} if asked.json_object else asked.json
    return matcher.grammar_from_json_schema(
        schema if isinstance(schema, str) else json.dumps(schema)
    )


def _refusal(asked: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{asked.kind} cannot be used: {_in_a_line(reason)}")


def _in_a_line(reason: str) -> str:
    line = (reason.strip().splitlines() or ["no reason given"])[0]
    return "no text of this vocabulary satisfies it" if line == _DEAD_END else line


class Matcher:
    """A text so far, and what may follow it."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def consume(self, tokens: Sequence[int]) -> None:
        """Adds tokens, each of which was allowed; `error` says where the grammar takes it back."""
        for token in tokens:
            if self._matcher.is_stopped() or not self._matcher.consume_token(token):
                return

    @property
    def error(self) -> str | None:
        """Why the text cannot go on, in a line: llguidance has met a limit or refuses a token.

        From then on it allows nothing but an end, which the grammar does not.
        """
        return _in_a_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(
        self, allowed: np.ndarray, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> None:
        """Writes what may follow each token of a block; what cannot be reached stays as it is.

        allowed: u32[N, ceil(V / 32)]. tokens: token 0 ends the text so far, and each other follows
        the one before it, or in a tree its parent, which stands before it.
        """
        if parents is None:
            parents = range(-1, len(tokens) - 1)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if node:
                children[parent].append(node)
        self._fill_from(0, allowed, tokens, children)

    def _fill_from(
        self, node: int, allowed: np.ndarray, tokens: Sequence[int], children: list[list[int]]
    ) -> None:
        row = allowed[node]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for child in children[node]:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([tokens[child]]):
                continue
            self._fill_from(child, allowed, tokens, children)
            self._matcher.rollback(1)
