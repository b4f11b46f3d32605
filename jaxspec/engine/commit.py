"""From a landed result to tokens, text and the end of a request. Host only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from jaxspec.engine.sequence import Sequence
from jaxspec.request import FinishReason, Logprob


def commit_tokens(
    seq: Sequence,
    tokens: list[int],
    *,
    finished: bool,
    logprobs: SequenceOf[dict[int, Logprob]] = (),
) -> None:
    """Appends the committed tokens of one step and finds out whether the request has ended.

    The device has cut `tokens` at the first stop id and at the length limit already; a stop
    string ends the request earlier, at the token that completes it, and nothing after is kept.
    Text that no stop string may end is made when somebody asks for it.

    finished: what the device says. logprobs: an entry a token, or none.
    """
    if not seq.needs_host_stop:
        seq.output_ids += tokens
        seq.logprobs += logprobs
    elif _append_until_stop_string(seq, tokens, logprobs):
        return
    if not finished:
        return
    last = seq.output_ids[-1] if seq.output_ids else None
    seq.finish_reason = FinishReason.LENGTH
    if last in seq.stop_ids:
        seq.finish_reason, seq.stop_reason = FinishReason.STOP, last
    if seq.needs_host_stop:
        seq.catch_up()
        _end_at_stop_string(seq)


def _append_until_stop_string(
    seq: Sequence, tokens: list[int], logprobs: SequenceOf[dict[int, Logprob]]
) -> bool:
    """Appends token by token; True where a stop string has ended the request."""
    for place, token in enumerate(tokens):
        seq.output_ids.append(token)
        seq.logprobs += logprobs[place : place + 1]
        seq.catch_up()
        if len(seq.output_ids) <= seq.request.params.min_tokens:
            seq.num_searched_chars = len(seq.text)
        elif _end_at_stop_string(seq):
            return True
    return False


def _end_at_stop_string(seq: Sequence) -> bool:
    """Ends the request at the stop string that is complete first, if one is."""
    params = seq.request.params
    found = []
    for stop in params.stop:
        begin = seq.text.find(stop, max(0, seq.num_searched_chars - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), -len(stop), stop))
    if not found:
        seq.num_searched_chars = len(seq.text)
        return False
    end, _, stop = min(found)
    seq.text = seq.text[: end if params.include_stop_str_in_output else end - len(stop)]
    seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop
    seq.detokenizer = None  # what it holds back is not said
    return True
