"""`jaxspec bench startup`: from the command to the first word, compiling or not."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.settings import Settings
from jaxspec.config import ConfigError

COLUMNS = (
    Column("drafter", "drafter"),
    Column("start", "start"),
    Column("first_token_s", "first token s", number(1)),
    Column("wall_s", "whole command s", number(1)),
    Column("cpu_s", "CPU s", number(1)),
    Column("peak_mb", "peak memory MB", number(0)),
)
_PROMPT = "What is the capital of France?"


class Start(NamedTuple):
    """One run of the command."""

    first_token_s: float
    wall_s: float
    cpu_s: float
    peak_mb: float


def run(settings: Settings) -> Result:
    """Runs `jaxspec generate` in processes of its own; the model is on this machine already."""
    from jaxspec.engine.assemble import open_model

    open_model(settings.config, cache_dir=settings.cache_dir, on_progress=settings.on_progress)
    rows = []
    for drafter in settings.drafters:
        with tempfile.TemporaryDirectory() as folder:
            settings.on_progress(f"starting cold with {drafter}", 0, 0)
            cold = start(settings, drafter, Path(folder))
            settings.on_progress(f"starting warm with {drafter}", 0, 0)
            warm = [start(settings, drafter, Path(folder)) for _ in range(settings.repeats)]
        rows.append({"drafter": drafter, "start": "cold", **cold._asdict()})
        middle = Start(*(statistics.median(values) for values in zip(*warm, strict=True)))
        rows.append({"drafter": drafter, "start": "warm", **middle._asdict()})
    return Result(
        "from the command to the first token",
        COLUMNS,
        rows,
        {
            "cold": "the compilation cache is empty, as at the first start",
            "warm": f"the cache holds the programs; median of {settings.repeats}",
        },
    )


def start(settings: Settings, drafter: str, compiled: Path) -> Start:
    """Runs the command once; compiled programs go to and come from `compiled`.

    Raises:
        ConfigError: the command fails.
    """
    command = [sys.executable, "-m", "jaxspec", "generate", _PROMPT, "--max-tokens", "16"]
    command += ["--model", settings.config.model, "--drafter", drafter]
    command += ["--dtype", settings.config.dtype]
    environment = {
        **os.environ,
        "JAXSPEC_CACHE": str(settings.cache_dir),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    before = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(1)
        first_token_s = time.perf_counter() - before
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - before
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"{' '.join(command)} failed: {''.join(last)}")
    cpu_s = usage.ru_utime + usage.ru_stime
    # Linux counts memory in KiB.
    return Start(first_token_s, wall_s, cpu_s, usage.ru_maxrss * 1024 / 1e6)
