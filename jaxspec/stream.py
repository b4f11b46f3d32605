"""An answer as it grows, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from jaxspec.inbox import Inbox
from jaxspec.request import RequestOutput


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds.

    finished: nothing more of this answer comes. output: the request so far, with its counts and
    times; at the end, why it ended. index: of the answer, where there are several.
    """

    text: str
    token_ids: list[int]
    finished: bool
    output: RequestOutput
    index: int = 0


class Stream(Iterator[Delta]):
    """The answer to one prompt as it grows; see `LLM.stream`.

    request_id: for `LLM.abort`. output: the request so far; None before its first token.
    """

    def __init__(self, inbox: Inbox, request_id: str):
        self.request_id = request_id
        self.output: RequestOutput | None = None
        self._inbox = inbox
        self._shown: dict[int, tuple[int, int]] = {}  # answer -> characters and tokens
        self._finished: set[int] = set()
        self._over = False

    def __next__(self) -> Delta:
        """Runs the engine until there is more of the answer.

        Raises:
            StopIteration: the answer is complete, or the stream was closed.
        """
        while not self._over:
            delta = self._advance()
            if delta is not None:
                return delta
            self._inbox.step()
        raise StopIteration

    def _advance(self) -> Delta | None:
        """What has come since the last delta of some answer."""
        output = self._inbox.latest(self.request_id)
        if output is None:
            return None
        self.output = output
        for completion in output.outputs:
            index, finished = completion.index, completion.finish_reason is not None
            num_chars, num_tokens = self._shown.get(index, (0, 0))
            text, token_ids = completion.text[num_chars:], completion.token_ids[num_tokens:]
            if not (text or token_ids or finished) or index in self._finished:
                continue
            self._shown[index] = (len(completion.text), len(completion.token_ids))
            if finished:
                self._finished.add(index)
            if len(self._finished) == len(output.outputs):
                self.close()
            return Delta(text, token_ids, finished, output, index)
        return None

    def close(self) -> None:
        """Ends the stream, and the request where it still runs."""
        if not self._over:
            self._over = True
            self._inbox.forget(self.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Garbage may be collected in the middle of a step, so the engine is left alone here.
        if not self._over:
            self._inbox.forget_later(self.request_id)
