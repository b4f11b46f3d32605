"""One engine and everybody who waits for it: steps it, and keeps the news for whom it concerns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxspec.copies import Copies
from jaxspec.engine.device_faults import DeviceFault, EngineFault
from jaxspec.engine.engine import Engine
from jaxspec.future_map import RelayError
from jaxspec.interrupts import held_back_interrupts
from jaxspec.prompts import EncodedPrompt
from jaxspec.request import Request, RequestError, RequestOutput, SamplingParams


class Inbox:
    """Requests of one engine by name, and the latest output of each that somebody waits for.

    Whoever waits calls `step`, which moves all requests on, also those of others.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._names = itertools.count()
        self._latest: dict[str, RequestOutput | None] = {}
        self._dropped: list[str] = []
        self._copies: dict[str, Copies] = {}  # of the requests that are answered several times

    def add(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        are_watched: bool = True,
    ) -> list[str]:
        """Queues requests, all of them or none, and gives their names.

        sampling_params: for all, or a list with one for each; None: the defaults. are_watched: see
        `Request.is_watched`.

        Raises:
            RequestError: one of them cannot be served.
        """
        all_params = _one_each(sampling_params, len(prompts))
        names: list[str] = []
        try:
            for prompt, params in zip(prompts, all_params, strict=True):
                name = str(next(self._names))
                request = Request(
                    name, prompt.token_ids, params, prompt.text, is_watched=are_watched
                )
                names.append(name)
                self._latest[name] = None
                if params.n > 1:
                    self._copies[name] = Copies(request)
                for each in self._requests_of(name, request):
                    self._engine.add_request(each)
        except BaseException:
            for name in names:
                self.forget(name)
            raise
        return names

    def latest(self, request_id: str) -> RequestOutput | None:
        """The request as it was last heard of; None before its first token.

        Of one that is not watched nothing is heard before its end.
        """
        return self._latest[request_id]

    def step(self) -> Sequence[RequestOutput]:
        """Runs the engine once; what it says is kept for whoever waits, and returned.

        Ctrl-C waits until the step is whole.
        """
        with held_back_interrupts():
            while self._dropped:
                self.forget(self._dropped.pop())
            try:
                outputs: Sequence[RequestOutput] = self._engine.step()
            except (RelayError, DeviceFault, EngineFault) as error:
                # The faulty requests say so themselves; the others, if any, go on.
                outputs = error.outputs
            outputs = self._put_together(outputs)
            for output in outputs:
                if output.request_id in self._latest:
                    self._latest[output.request_id] = output
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request; whoever waits for it is told. Nothing happens where it is over."""
        ended = map(self._engine.abort, self._names_of(request_id))
        for output in self._put_together([each for each in ended if each is not None]):
            if request_id in self._latest:
                self._latest[request_id] = output

    def forget(self, request_id: str) -> None:
        """Ends a request that nobody waits for any more."""
        for name in self._names_of(request_id):
            self._engine.abort(name)
        self._copies.pop(request_id, None)
        self._latest.pop(request_id, None)

    def forget_later(self, request_id: str) -> None:
        """As `forget`, with the next step: may be called at any time, in the middle of one too."""
        self._dropped.append(request_id)

    def _requests_of(self, name: str, request: Request) -> list[Request]:
        return self._copies[name].requests if name in self._copies else [request]

    def _names_of(self, name: str) -> list[str]:
        """What the engine calls a request."""
        if name not in self._copies:
            return [name]
        return [each.request_id for each in self._copies[name].requests]

    def _put_together(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """The outputs of requests, those of several answers to one made one."""
        together: dict[str, RequestOutput] = {}
        for output in outputs:
            name = output.request_id.partition("/")[0]
            if name in self._copies:
                self._copies[name].hear(output)
                output = self._copies[name].output()
            together[output.request_id] = output
        return list(together.values())

    @property
    def is_empty(self) -> bool:
        """True while nobody waits for anything."""
        return not (self._latest or self._dropped)


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    params = SamplingParams() if sampling_params is None else sampling_params
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params is of type {type(params).__name__}; give a SamplingParams, or a "
            "list with one for each prompt"
        )
    if len(params) != count:
        raise RequestError(
            f"there are {len(params)} sampling_params for {count} prompts; give one for all, or "
            "one for each"
        )
    return params
