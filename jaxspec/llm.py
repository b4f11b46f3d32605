"""A language model in a Python program, in vLLM's manner: `LLM.generate`, `chat` and `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import Assembled, OpenedModel, assemble
from jaxspec.engine.device_faults import explained
from jaxspec.engine.engine import Engine
from jaxspec.engine.warmup import warmup
from jaxspec.inbox import Inbox
from jaxspec.mode import Mode
from jaxspec.progress import ProgressDisplay
from jaxspec.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    as_list,
    encode_chat,
    encode_prompt,
)
from jaxspec.request import RequestOutput, SamplingParams
from jaxspec.stream import Stream
from jaxspec.tokenizer import Tokenizer
from jaxspec.weights.files import Progress

_DEFAULTS = EngineConfig()


def default_cache_dir() -> Path:
    """Where models and compiled programs are kept unless somebody says otherwise."""
    return Path.home() / ".cache" / "jaxspec"


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
        """Loads the model and compiles its programs.

        Args:
            model: alias, folder, Hugging Face repo id or .gguf file.
            lazy: compile a program only once a request needs it; else those of `warm_up` now.
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
        display = nullcontext(on_progress) if on_progress else ProgressDisplay()
        with display as progress, explained("at start"):
            assembled = assemble(config, cache_dir=cache_dir, on_progress=progress, opened=opened)
            if not lazy:
                modes = [mode for mode in Mode if mode.name.lower() in config.warm_up]
                warmup(assembled.engine, modes=modes, on_progress=progress)
        self.config = config
        self.assembled: Assembled = assembled
        self._inbox = Inbox(assembled.engine)

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
        is_one = isinstance(messages, Mapping) or not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        encoded = [
            encode_chat(
                self.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._generate(encoded, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Completes one prompt piece by piece.

        Closing the stream, or leaving its `with` block, before the end aborts the request.

        Raises:
            RequestError: as `generate`.
        """
        (name,) = self._inbox.add([encode_prompt(self.tokenizer, prompt)], sampling_params)
        return Stream(self._inbox, name)

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
        (name,) = self._inbox.add([prompt], sampling_params)
        return Stream(self._inbox, name)

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with what there is and finish_reason "abort"."""
        self._inbox.abort(request_id)

    def _generate(
        self,
        encoded: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        names = self._inbox.add(encoded, sampling_params, are_watched=False)
        mine = set(names)
        results: dict[str, RequestOutput] = {}
        try:
            with ProgressDisplay() if use_tqdm else nullcontext() as progress:
                while len(results) < len(names):
                    for output in self._inbox.step():
                        if output.finished and output.request_id in mine:
                            results[output.request_id] = output
                    if progress is not None:
                        progress("generating", len(results), len(names))
        finally:
            for name in names:
                self._inbox.forget(name)
        return [results[name] for name in names]
