"""Text from a growing list of token ids, without ever showing half a character. Host only."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class IncrementalDetokenizer:
    """One answer's text, piece by piece.

    Whatever the sizes of the pieces, they join to `Tokenizer.decode` of all ids; only `flush` may
    give U+FFFD for an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Starts an empty text.

        Args:
            tokenizer: of the model that makes the ids.
            skip_special_tokens: leave out control tokens, as `Tokenizer.decode` does.
        """
        stream = _ByteStream if tokenizer.is_byte_level else _WindowStream
        self._stream = stream(tokenizer, skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and gives the text that has become certain, perhaps none."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """Ends the text and gives what was held back."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level vocabularies: a token is a string of bytes, so UTF-8 is decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        return self._decoder.decode(
            b"".join(
                tokenizer.token_bytes(token)
                for token in ids
                if not (self._skip and tokenizer.is_special(token))
            )
        )

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Other vocabularies: the text of a token depends on its neighbours, so a window is decoded.

    The window holds tokens already shown, enough of them to have text (a first token loses its
    leading space), and those held back. Example, SentencePiece: shown ["▁to"], new ["▁be"]:
    decode(["▁to", "▁be"]) = "to be", less decode(["▁to"]) = "to", gives " be".
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        self._window += ids
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or self._ends_in_bytes():
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        delta = text[len(self._decode(self._window[: self._num_shown])) :]
        newest = self._window[self._num_shown :]
        if self._decode(newest):
            self._window = newest
        self._num_shown = len(self._window)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _ends_in_bytes(self) -> bool:
        """Whether the last token is one raw byte: a run of these is valid, or not, as a whole."""
        for token_id in reversed(self._window):
            token = self._tokenizer.token(token_id)
            if token is not None and not (self._skip and self._tokenizer.is_special(token_id)):
                return _BYTE_TOKEN.fullmatch(token) is not None
        return False
