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
    stop_ids: set[int],
    logprobs: SequenceOf[dict[int, Logprob]] = (),
) -> None:
    """Appends the committed tokens of one step and finds out whether the request has ended.

    The device has cut `tokens` at the first stop id and at the length limit already; a stop
    string ends the request earlier, at the token that completes it, and nothing after is kept.

    finished: what the device says. stop_ids: the request's, EOS included. logprobs: an entry a
    token, or none.
    """
    for place, token in enumerate(tokens):
        seq.output_ids.append(token)
        seq.logprobs += logprobs[place : place + 1]
        if seq.detokenizer is not None:
            if token not in stop_ids:
                seq.text += seq.detokenizer.push([token])
            if len(seq.output_ids) <= seq.request.params.min_tokens:
                seq.num_unstoppable_chars = len(seq.text)
            elif seq.needs_host_stop and _end_at_stop_string(seq):
                return
    if not finished:
        return
    if seq.detokenizer is not None:
        seq.text += seq.detokenizer.flush()
        if seq.needs_host_stop and _end_at_stop_string(seq):
            return
    last = seq.output_ids[-1] if seq.output_ids else None
    if last in stop_ids:
        seq.finish_reason, seq.stop_reason = FinishReason.STOP, last
    else:
        seq.finish_reason = FinishReason.LENGTH


def _end_at_stop_string(seq: Sequence) -> bool:
    """Ends the request at the stop string that is complete first, if one is."""
    params = seq.request.params
    found = []
    for stop in params.stop:
        begin = seq.text.find(stop, max(0, seq.num_unstoppable_chars - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), -len(stop), stop))
    if not found:
        return False
    end, _, stop = min(found)
    seq.text = seq.text[: end if params.include_stop_str_in_output else end - len(stop)]
    seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop
    return True
