"""A language model in a Python program, in vLLM's manner: `LLM.generate`, `chat` and `stream`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import Assembled, OpenedModel, assemble
from jaxspec.engine.engine import Engine
from jaxspec.engine.warmup import warmup
from jaxspec.future_map import RelayError
from jaxspec.interrupts import held_back_interrupts
from jaxspec.progress import ProgressDisplay
from jaxspec.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    as_list,
    encode_chat,
    encode_prompt,
)
from jaxspec.request import (
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.files import Progress

_DEFAULTS = EngineConfig()


def default_cache_dir() -> Path:
    """Where models and compiled programs are kept unless somebody says otherwise."""
    return Path.home() / ".cache" / "jaxspec"


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds.

    output: the request so far, with its counts and times; at the end, why it ended.
    """

    text: str
    token_ids: list[int]
    finished: bool
    output: RequestOutput


class LLM:
    """A model, its drafter and the engine that serves them, on the devices of this process.

    Not thread-safe: one thread calls its methods. Several streams may be open at once, also
    around a `generate`; they share the steps of the engine.
    """

    def __init__(
        self,
        model: str = _DEFAULTS.model,
        *,
        lazy: bool = False,
        cache_dir: Path | None = None,
        compilation_cache: bool = True,
        on_progress: Progress | None = None,
        **options: Any,
    ):
        """Loads the model and compiles every program.

        Args:
            model: alias, folder, Hugging Face repo id or .gguf file.
            lazy: compile a program only once a request needs it.
            cache_dir: keeps the default model and compiled programs; by default ~/.cache/jaxspec.
            compilation_cache: keep compiled programs there, unless jax has a cache already.
            on_progress: told what takes long; by default a bar on stderr.
            options: the other fields of `EngineConfig`: drafter, dtype, revision, max_model_len,
                max_num_seqs, gpu_memory_utilization, seed and so on.

        Raises:
            ConfigError: an unknown option, or settings that cannot be met.
            ModelFileError: no such model or drafter, or jaxspec cannot use it.
            UnsupportedKernel: a kernel asked for by name that cannot run here.
        """
        self._start(
            EngineConfig.from_kwargs(model=model, **options),
            lazy=lazy,
            cache_dir=cache_dir,
            compilation_cache=compilation_cache,
            on_progress=on_progress,
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        lazy: bool = False,
        cache_dir: Path | None = None,
        compilation_cache: bool = True,
        on_progress: Progress | None = None,
        opened: OpenedModel | None = None,
    ) -> LLM:
        """As the constructor, from settings that were checked before.

        opened: the model that `config` names, where it is open already.
        """
        llm = cls.__new__(cls)
        llm._start(
            config,
            lazy=lazy,
            cache_dir=cache_dir,
            compilation_cache=compilation_cache,
            on_progress=on_progress,
            opened=opened,
        )
        return llm

    def _start(
        self,
        config: EngineConfig,
        *,
        lazy: bool,
        cache_dir: Path | None,
        compilation_cache: bool,
        on_progress: Progress | None,
        opened: OpenedModel | None = None,
    ) -> None:
        cache_dir = cache_dir or default_cache_dir()
        if compilation_cache:
            use_compilation_cache(cache_dir / "compiled")
        with nullcontext(on_progress) if on_progress else ProgressDisplay() as progress:
            assembled = assemble(config, cache_dir=cache_dir, on_progress=progress, opened=opened)
            if not lazy:
                warmup(assembled.engine, on_progress=progress)
        self.config = config
        self.assembled: Assembled = assembled
        self._names = itertools.count()
        self._latest: dict[str, RequestOutput | None] = {}  # of requests that somebody waits for
        self._dropped: list[str] = []  # requests of streams that were lost without being closed

    @property
    def engine(self) -> Engine:
        """The engine, for its sums in `stats`."""
        return self.assembled.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.assembled.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under vLLM's name."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, and gives the results in their order.

        A request that fails on the device comes back with finish_reason "error" and its message
        in `error`; the others are not touched by it.

        Args:
            prompts: text, token ids or {"prompt_token_ids": ids}, or a list of such.
            sampling_params: for all prompts, or a list with one for each; None: the defaults.
            use_tqdm: show a progress bar on stderr.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has run then.
        """
        encoded = [encode_prompt(self.tokenizer, prompt) for prompt in as_list(prompts)]
        return self._generate(encoded, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, written as the model's chat template says.

        Args:
            messages: {"role": ..., "content": ...} each, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar on stderr.
            add_generation_prompt: end the prompt with the header of the assistant's turn.
            enable_thinking: for templates that know it; None leaves it to the template.
            chat_template_kwargs: what else the template may read.

        Raises:
            RequestError: as `generate`, or the model has no chat template, or its template
                refuses the messages.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        encoded = [
            encode_chat(
                self.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in (messages if several else [messages])
        ]
        return self._generate(encoded, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Completes one prompt piece by piece.

        Closing the stream, or leaving its `with` block, before the end aborts the request.

        Raises:
            RequestError: as `generate`.
        """
        (name,) = self._add([encode_prompt(self.tokenizer, prompt)], sampling_params)
        return Stream(self, name)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answers one conversation piece by piece; arguments as of `chat`, the rest as `stream`.

        Raises:
            RequestError: as `chat`.
        """
        prompt = encode_chat(
            self.tokenizer,
            messages,
            enable_thinking=enable_thinking,
            chat_template_kwargs=chat_template_kwargs,
        )
        (name,) = self._add([prompt], sampling_params)
        return Stream(self, name)

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with what there is and finish_reason "abort"."""
        output = self.engine.abort(request_id)
        if output is not None and request_id in self._latest:
            self._latest[request_id] = output

    def _generate(
        self,
        encoded: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        names = self._add(encoded, sampling_params)
        mine = set(names)
        results: dict[str, RequestOutput] = {}
        try:
            with ProgressDisplay() if use_tqdm else nullcontext() as progress:
                while len(results) < len(names):
                    for output in self._step():
                        if output.finished and output.request_id in mine:
                            results[output.request_id] = output
                    if progress is not None:
                        progress("generating", len(results), len(names))
        finally:
            for name in names:
                self._forget(name)
        return [results[name] for name in names]

    def _add(
        self,
        encoded: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[str]:
        """Queues requests, all of them or none."""
        all_params = _one_each(sampling_params, len(encoded))
        names: list[str] = []
        try:
            for prompt, params in zip(encoded, all_params, strict=True):
                name = str(next(self._names))
                self.engine.add_request(Request(name, prompt.token_ids, params, prompt.text))
                self._latest[name] = None
                names.append(name)
        except BaseException:
            for name in names:
                self._forget(name)
            raise
        return names

    def _forget(self, request_id: str) -> None:
        """Ends a request that nobody waits for any more."""
        self.engine.abort(request_id)
        self._latest.pop(request_id, None)

    def _step(self) -> Sequence[RequestOutput]:
        """Runs the engine once; what it says is kept for whoever waits, and returned."""
        while self._dropped:
            self._forget(self._dropped.pop())
        with held_back_interrupts():
            try:
                outputs: Sequence[RequestOutput] = self.engine.step()
            except RelayError as error:
                # The faulty requests say so themselves; the others go on.
                outputs = error.outputs
            for output in outputs:
                if output.request_id in self._latest:
                    self._latest[output.request_id] = output
        return outputs


class Stream(Iterator[Delta]):
    """The answer to one prompt as it grows; see `LLM.stream`.

    request_id: for `LLM.abort`. output: the request so far; None before its first token.
    """

    def __init__(self, llm: LLM, request_id: str):
        self.request_id = request_id
        self.output: RequestOutput | None = None
        self._llm = llm
        self._num_chars = 0
        self._num_tokens = 0
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
            self._llm._step()
        raise StopIteration

    def _advance(self) -> Delta | None:
        """What has come since the last delta."""
        output = self._llm._latest[self.request_id]
        if output is None:
            return None
        self.output = output
        completion = output.outputs[0]
        text = completion.text[self._num_chars :]
        token_ids = completion.token_ids[self._num_tokens :]
        if not (text or token_ids or output.finished):
            return None
        self._num_chars += len(text)
        self._num_tokens += len(token_ids)
        if output.finished:
            self.close()
        return Delta(text, token_ids, output.finished, output)

    def close(self) -> None:
        """Ends the stream, and the request where it still runs."""
        if not self._over:
            self._over = True
            self._llm._forget(self.request_id)

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
            self._llm._dropped.append(self.request_id)


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
