"""Text to token ids and back, from a GGUF file's metadata or a folder's tokenizer. Host only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from jaxspec.chat_template import ChatTemplate
from jaxspec.detokenizer import IncrementalDetokenizer
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.gguf_tokenizer import gguf_tokenizer
from jaxspec.weights.json_fields import read_json

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates read it


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        bos_id: int | None = None,
    ) -> None:
        """Wraps a tokenizer of the `tokenizers` package.

        Args:
            backend: maps text to ids and back.
            name: of the model, for messages.
            special_tokens: "bos_token", "eos_token" and so on, as templates may use them.
            chat_template: jinja2 source; None where the model has none.
            bos_id: what `encode` puts first, where the backend does not do so itself.

        Raises:
            ModelFileError: the template is not valid jinja2.
        """
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self._backend = backend
        self._template = ChatTemplate(chat_template, name=name) if chat_template else None
        self._prefix = [] if bos_id is None else [bos_id]
        added = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(id_ for id_, token in added if token.special)
        self._token_bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """How many tokens have a text; a model may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._template is not None

    @property
    def is_byte_level(self) -> bool:
        """Whether every token stands for bytes of its own, so that `token_bytes` holds."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` package writes it."""
        return self._backend.to_str()

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact text, None when there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, None when there is none."""
        return self._backend.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is control and not text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a byte-level token stands for, b"" where the id has no token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = _bytes_of(self.token(token_id) or "")
        return known

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids; control tokens spelled out in the text become their ids.

        Args:
            text: any text.
            add_special_tokens: add what the model expects around a text, a BOS token perhaps.

        Raises:
            ValueError: the text holds a lone surrogate: bytes that were not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid UTF-8 at character {error.start} "
                f"({text[error.start]!r}); pass UTF-8."
            ) from None
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._prefix and ids[:1] != self._prefix:
            return self._prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turns ids into text; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """An empty text that grows with the ids pushed to it."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Writes a conversation as the model was trained to read it.

        Args:
            messages: the turns so far.
            add_generation_prompt: end with the header of the assistant's turn.
            options: what else the template reads, such as `enable_thinking` or `tools`.

        Raises:
            ValueError: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                f"{self.name} has no chat template; prompt it with plain text, or choose a model "
                "that was tuned for chat."
            )
        variables = {**self.special_tokens, **options}
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The ids of `apply_chat_template`, which writes special tokens itself."""
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **options
        )
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(source: Path | Mapping[str, Any], *, name: str) -> Tokenizer:
    """Builds a model's tokenizer.

    Args:
        source: the folder that holds tokenizer.json, or a GGUF file's metadata.
        name: of the model, for messages.

    Raises:
        ModelFileError: the tokenizer is missing, corrupt, or of a kind that is not supported; or
            the chat template is not valid jinja2.
    """
    if isinstance(source, Path):
        return _from_folder(source, name)
    backend, special_tokens, bos_id = gguf_tokenizer(source, name)
    return Tokenizer(
        backend,
        name=name,
        special_tokens=special_tokens,
        chat_template=source.get("tokenizer.chat_template"),
        bos_id=bos_id,
    )


def _from_folder(folder: Path, name: str) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(
            folder,
            "has no tokenizer.json",
            "save the model's tokenizer in that form (transformers: AutoTokenizer.save_pretrained)",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ModelFileError(
            path, f"cannot be read ({error})", "it is truncated or corrupt, fetch it again"
        ) from None
    # A file may carry its training's settings, which would cut or pad prompts silently.
    backend.no_truncation()
    backend.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    template_path = folder / "chat_template.jinja"
    template = (
        template_path.read_text("utf-8")
        if template_path.exists()
        else _default_template(config.get("chat_template"))
    )
    special_tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return Tokenizer(backend, name=name, special_tokens=special_tokens, chat_template=template)


def _default_template(value: str | list[dict[str, str]] | None) -> str | None:
    """Some models have several templates by name; the one for plain chat is called default."""
    if isinstance(value, list):
        return {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: "Ġ" is a space.

    Bytes that print keep their character; the other 68 get U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str) -> bytes:
    """The bytes of a vocabulary entry; a text with any other character stands for itself."""
    if not _BYTE_OF_CHAR.keys() >= set(token):
        return token.encode()
    return bytes(_BYTE_OF_CHAR[char] for char in token)
