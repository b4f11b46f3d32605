"""A result that has come back from the device, as the host reads it: row by row. Host only."""

from __future__ import annotations

import numpy as np

from jaxspec.engine.admission import Tile
from jaxspec.engine.commit import commit_tokens
from jaxspec.engine.dispatch import Dispatch
from jaxspec.engine.draft_record import DraftRecord
from jaxspec.engine.logprob_output import DecodeToken, read_logprobs
from jaxspec.engine.sequence import Sequence
from jaxspec.engine.state import StepOutput


class Landed:
    """A result, and what those of its rows that were committed have brought.

    steps: of each step of a loop, else of the one, the rows' columns as Python's numbers, since an
    element of an array costs as much as a row of them. accepted: drafts accepted, an entry a verify
    that counts. num_kept: tokens that these leave.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        packed: np.ndarray,
        *,
        vocab_size: int,
        token_text: DecodeToken | None,
    ):
        """packed: what the dispatch has put out. token_text: the text of a token alone."""
        packed = packed if packed.ndim == 3 else packed[None]
        self._dispatch, self._width, self._token_text = dispatch, dispatch.width, token_text
        self._logprobs: np.ndarray | None = None
        if dispatch.mode.logprobs:
            self._logprobs = StepOutput.unpack(packed, self._width, vocab_size).logprobs
        self.steps: list[list[list[int]]] = packed[..., : self._width + 4].tolist()
        self.accepted: list[int] = []
        self.num_kept = 0

    def errors(self, step: int, row: int) -> int:
        """The error bits of a row."""
        return self.steps[step][row][self._width + 3]

    def num_committed(self, step: int, row: int) -> int:
        """How many tokens the device has committed."""
        return self.steps[step][row][self._width]

    def commit(self, seq: Sequence, step: int, row: int) -> None:
        """Gives a request the tokens of its row."""
        columns, width = self.steps[step][row], self._width
        count, num_accepted = columns[width], columns[width + 1]
        finished = columns[width + 2] and not columns[width + 3]  # what ended it was not good
        tokens, logprobs = columns[:count], ()
        if (num_top := seq.request.params.logprobs) is not None:
            of_row = self._logprobs[step, row]
            logprobs = read_logprobs(of_row, tokens, num_top, self._token_text)
        num_before = len(seq.output_ids)
        commit_tokens(seq, tokens, finished=bool(finished), logprobs=logprobs)
        if seq.matcher is not None:
            seq.matcher.consume(seq.output_ids[num_before:])
        if count and not self._dispatch.is_prefill:
            # A stop string may have cut off tokens that the device committed.
            num_kept = len(seq.output_ids) - num_before
            seq.metrics.count_verify(width - 1, num_accepted, num_kept)
            self.accepted.append(num_accepted)
            self.num_kept += num_kept

    def accepted_on_device(self) -> list[tuple[DraftRecord, int]]:
        """Drafts accepted, by request, in each step in which the device has committed something."""
        width, entries = self._width, self._dispatch.entries
        return [
            (seq.draft_record, row[width + 1])
            for step in self.steps
            for (seq, _), row in zip(entries, step, strict=False)
            if row[width] > 0
        ]

    def keep_prompt_logprobs(self) -> None:
        """Keeps what the tiles of a prefill tell of their prompts."""
        for row, tile in enumerate(self._dispatch.tiles):
            num_top = tile.seq.request.params.prompt_logprobs
            if num_top is not None and not tile.seq.is_over:
                self._keep_of_tile(tile, self._logprobs[0, row, 1:], num_top)

    def _keep_of_tile(self, tile: Tile, columns: np.ndarray, num_top: int) -> None:
        """A request that was preempted has told some before."""
        seq = tile.seq
        first = len(seq.prompt_logprobs) + 1
        tokens = seq.request.prompt_token_ids[first : tile.start + tile.num_tokens + 1]
        columns = columns[first - tile.start - 1 :]
        seq.prompt_logprobs += read_logprobs(columns, list(tokens), num_top, self._token_text)
