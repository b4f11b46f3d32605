"""Keeps compiled programs on disk, so that the next start compiles nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

log = logging.getLogger(__name__)


def use_compilation_cache(folder: Path) -> None:
    """Makes every later compilation of this process go through `folder`.

    Where the user has given jax a cache folder of their own (JAX_COMPILATION_CACHE_DIR), that and
    its settings stay. Whoever can write to the folder can run code here.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs cannot be kept in %s (%s)", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default jax keeps only what took long to compile; a start needs all of its programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax looks for a cache once, at its first compilation, which may be over.
    compilation_cache.reset_cache()
