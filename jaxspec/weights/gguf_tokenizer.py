"""Builds a byte-level BPE tokenizer from a GGUF file's metadata. Host only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxspec.weights.files import ModelFileError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of GGUF
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # HF's word: GGUF's

# How text is cut into words before merging, as the models' own tokenizer.json say.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_WORDS = {  # by the value of tokenizer.ggml.pre
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": lambda: _split(_QWEN2_WORDS),
    "llama-bpe": lambda: _split(_LLAMA3_WORDS),
}


def gguf_tokenizer(
    meta: Mapping[str, Any], name: str
) -> tuple[tokenizers.Tokenizer, dict[str, str], int | None]:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        meta: the file's metadata.
        name: of the model, for messages.

    Returns:
        The tokenizer; its special tokens as chat templates call them ("bos_token"); the id that
        the model expects before every text, None where it expects none.

    Raises:
        ModelFileError: another kind of tokenizer, or a corrupt one.
    """
    kind, words = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or not isinstance(words, str) or words not in _WORDS:
        raise ModelFileError(
            name,
            f"its GGUF tokenizer ({kind!r}, pre {words!r}) is not supported",
            f"jaxspec builds 'gpt2' with pre {', '.join(_WORDS)}, use the model's safetensors",
        )
    # llama.cpp's default where the key is absent.
    adds_bos = meta.get("tokenizer.ggml.add_bos_token", words == "llama-bpe")
    try:
        backend = _byte_level_bpe(meta, words)
        tokens = meta["tokenizer.ggml.tokens"]
        special_tokens = {
            f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
            for role, key in _ROLES.items()
            if f"tokenizer.ggml.{key}_token_id" in meta
        }
        bos_id = meta["tokenizer.ggml.bos_token_id"] if adds_bos else None
    except Exception as error:  # `tokenizers` raises nothing narrower for impossible merges
        raise ModelFileError(
            name, f"its tokenizer is corrupt ({error!r})", "fetch the GGUF file again"
        ) from None
    return backend, special_tokens, bos_id


def _byte_level_bpe(meta: Mapping[str, Any], words: str) -> tokenizers.Tokenizer:
    types = meta["tokenizer.ggml.token_type"].tolist()
    typed = list(zip(meta["tokenizer.ggml.tokens"], types, strict=True))
    backend = tokenizers.Tokenizer(
        models.BPE(
            # Converters fill up the vocabulary with texts that no input may become.
            vocab={token: id_ for id_, (token, type_) in enumerate(typed) if type_ != _UNUSED},
            merges=[tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]],
            ignore_merges=words == "llama-bpe",  # whole words of the vocabulary come first
        )
    )
    if words == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[words]())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in typed
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend
