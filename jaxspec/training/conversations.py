"""Training data on disk: token ids in parts, each written whole or not at all. Host only."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.training.config import TrainingError
from jaxspec.training.rows import Conversation

META = "meta.json"
TRAIN, HELD_OUT = "train", "held-out"  # kinds of parts
_AGAIN = "make the data again with `jaxspec train data`"


def save_part(folder: Path, kind: str, number: int, conversations: Sequence[Conversation]) -> None:
    """Writes one part; a file of that name is replaced.

    Raises:
        TrainingError: the disk is full or the folder cannot be written; no half part remains.
    """
    lengths = np.array([len(c.token_ids) for c in conversations], np.int32)
    token_ids = _joined([c.token_ids for c in conversations], np.int32)
    if not len(token_ids) or token_ids.max() < 1 << 16:
        token_ids = token_ids.astype(np.uint16)
    supervised = np.packbits(_joined([c.supervised for c in conversations], bool))
    path = folder / f"{kind}-{number:05d}.npz"
    write_whole(
        path,
        lambda file: np.savez_compressed(
            file, token_ids=token_ids, lengths=lengths, supervised=supervised
        ),
    )


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def write_whole(path: Path, write: Any) -> None:
    """Calls `write` with a binary file beside `path`, then puts it in its place.

    Raises:
        TrainingError: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            write(file)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise TrainingError(
            f"{path} could not be written ({error.strerror}); free some space and run again, "
            "what was written before is kept"
        ) from None


def parts(folder: Path, kind: str) -> list[Path]:
    """The parts of a kind, in order."""
    return sorted(folder.glob(f"{kind}-[0-9]*.npz"))


def load_conversations(folder: Path, kind: str) -> list[Conversation]:
    """Reads all parts of a kind.

    Raises:
        TrainingError: a part is cut short or no part at all.
    """
    conversations = []
    for path in parts(folder, kind):
        try:
            with open(path, "rb") as raw, np.load(raw) as file:
                token_ids, lengths = file["token_ids"].astype(np.int32), file["lengths"]
                supervised = np.unpackbits(file["supervised"], count=len(token_ids)).astype(bool)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise TrainingError(f"{path} cannot be read ({error}); remove it or {_AGAIN}") from None
        ends = np.cumsum(lengths)
        if len(token_ids) != (ends[-1] if len(ends) else 0):
            raise TrainingError(f"{path} holds {len(token_ids)} tokens, not the sum of its lengths")
        for start, end in zip(ends - lengths, ends, strict=True):
            conversations.append(Conversation(token_ids[start:end], supervised[start:end]))
    return conversations


def save_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes what the data is, beside it."""
    text = json.dumps(meta, indent=2) + "\n"
    write_whole(folder / META, lambda file: file.write(text.encode()))


def load_meta(folder: Path) -> dict[str, Any]:
    """Reads what the data is.

    Raises:
        TrainingError: the folder is no training data.
    """
    path = folder / META
    if not path.is_file():
        raise TrainingError(f"{folder} is no training data: it has no {META}; {_AGAIN}")
    try:
        meta = json.loads(path.read_text())
        meta["model"], meta["vocab_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read ({error!r}); {_AGAIN}") from None
    return meta
