"""From what a caller gives as a prompt to token ids: text, ids, conversations. Host only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.request import RequestError
from jaxspec.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages, {"role": ..., "content": ...}."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it, and its text where it had one."""

    token_ids: tuple[int, ...]
    text: str | None


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> EncodedPrompt:
    """Turns a `Prompt`, text or token ids, into what the engine takes.

    Raises:
        RequestError: it is neither, or the text is not valid.
    """
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not known:
            raise RequestError(
                f"a prompt has the keys {list(prompt)}; give it 'prompt' or 'prompt_token_ids'"
            )
        if isinstance(prompt[known[0]], str) != (known[0] == "prompt"):
            what = "text" if known[0] == "prompt" else "a list of token ids"
            raise RequestError(
                f"{known[0]!r} of a prompt is of type {type(prompt[known[0]]).__name__}; "
                f"give {what}"
            )
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        return EncodedPrompt(_checked(lambda: tokenizer.encode(prompt)), prompt)
    if hasattr(prompt, "tolist"):  # arrays
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestError(
            f"a prompt is of type {type(prompt).__name__}; give text or a list of token ids"
        )
    return EncodedPrompt(tuple(_plain_int(token) for token in prompt), None)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """Writes a conversation as a prompt; arguments as of `LLM.chat`.

    Raises:
        RequestError: the model has no chat template, or its template refuses the messages.
    """
    lone = isinstance(messages, Mapping)
    if lone or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError(
            f"messages is {messages!r}; give a list of {{'role': ..., 'content': ...}}, "
            "or a list of such lists"
        )
    options = dict(chat_template_kwargs or {})
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking

    def write() -> str:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **options
        )

    text = _checked(write)
    # The template writes the special tokens itself.
    return EncodedPrompt(_checked(lambda: tokenizer.encode(text, add_special_tokens=False)), text)


def as_list(prompts: Any) -> Sequence[Prompt]:
    """One prompt or several as several; a flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and _is_number(prompts[0]):
        return [prompts]
    if not isinstance(prompts, Sequence) and not getattr(prompts, "ndim", None):
        raise RequestError(
            f"prompts are of type {type(prompts).__name__}; give text, a list of token ids, or a "
            "list of such"
        )
    return prompts


def _checked(call: Callable[[], Any]) -> Any:
    """Runs a tokenizer's function; what it refuses is a fault of the request."""
    try:
        result = call()
    except ValueError as error:
        raise RequestError(str(error).removesuffix(".")) from None
    return tuple(result) if isinstance(result, list) else result


def _is_number(token: Any) -> bool:
    return isinstance(token, int) or getattr(token, "ndim", None) == 0


def _plain_int(token: Any) -> Any:
    """Numbers of numpy and jax as Python's; the engine refuses what is no whole number."""
    return token.item() if getattr(token, "ndim", None) == 0 else token
