"""Several answers to one prompt (`SamplingParams.n`): a request each, told as one. Host only."""

from __future__ import annotations

from dataclasses import fields, replace

from jaxspec.request import CompletionOutput, Request, RequestMetrics, RequestOutput

_EARLIEST, _LATEST = ("arrival_s", "first_token_s"), ("finished_s",)


class Copies:
    """The requests that one request with n > 1 becomes, and what was last heard of each.

    requests: for the engine; copy i draws its noise from `fold_in(seed, i)`.
    """

    def __init__(self, request: Request):
        self._request = request
        params = request.params
        self.requests = [
            replace(
                request,
                request_id=f"{request.request_id}/{index}",
                # What is told of the prompt is the same for all.
                params=replace(params, n=1, **({"prompt_logprobs": None} if index else {})),
                copy_index=index,
            )
            for index in range(params.n)
        ]
        self._latest: list[RequestOutput | None] = [None] * params.n

    def hear(self, output: RequestOutput) -> None:
        """Takes the news of one copy."""
        self._latest[int(output.request_id.rpartition("/")[2])] = output

    def output(self) -> RequestOutput:
        """The request as its caller sees it: an entry of `outputs` a copy."""
        heard = [each for each in self._latest if each is not None]
        first = self._latest[0]
        return RequestOutput(
            self._request.request_id,
            self._request.prompt,
            self._request.prompt_token_ids,
            [_completion(index, each) for index, each in enumerate(self._latest)],
            all(each is not None and each.finished for each in self._latest),
            merge_metrics([each.metrics for each in heard]),
            next((each.error for each in heard if each.error is not None), None),
            heard[0].num_cached_tokens,
            first.prompt_logprobs if first is not None else None,
        )


def _completion(index: int, output: RequestOutput | None) -> CompletionOutput:
    if output is None:
        return CompletionOutput(index, "", [])
    return replace(output.outputs[0], index=index)


def merge_metrics(several: list[RequestMetrics]) -> RequestMetrics:
    """Sums of counts; times from the earliest beginning to the latest end."""
    merged = RequestMetrics()
    for each in fields(RequestMetrics):
        values = [getattr(metrics, each.name) for metrics in several]
        known = [value for value in values if value is not None]
        if each.name in _EARLIEST:
            total = min(known, default=None)
        elif each.name in _LATEST:
            total = max(known, default=None) if len(known) == len(values) else None
        else:
            total = sum(known, start=type(known[0])())
        setattr(merged, each.name, total)
    return merged
