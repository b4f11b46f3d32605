"""From what the user says to an engine: files, kernels, sizes, weights, programs, in that order.

Every choice is made here, once, and reported with its reason.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax

from jaxspec.config import (
    ConfigError,
    EngineConfig,
    Geometry,
    check_model_len,
)
from jaxspec.drafters.base import Drafter, DrafterPlan, ModelParams
from jaxspec.drafters.narrow import widths_of
from jaxspec.drafters.registry import locate_drafter, plan_drafter
from jaxspec.drafters.shipped import Shipped, shipped_drafter
from jaxspec.engine.auto import StepTimes, StepWatch, judge, measure_steps, remembered_times
from jaxspec.engine.engine import Engine, WatchStep, unwatched
from jaxspec.engine.pace import Pace
from jaxspec.engine.parts import build_parts
from jaxspec.engine.self_test import self_test_kernels
from jaxspec.engine.sequence import Detokenizer
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import build_narrow_steps, build_steps
from jaxspec.grammar import Grammars
from jaxspec.mode import Mode
from jaxspec.models import Target
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import TargetParams
from jaxspec.request import Request
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec.weights.checkpoint import Checkpoint, open_checkpoint
from jaxspec.weights.files import Progress, no_progress
from jaxspec.weights.hub import find_model
from jaxspec.weights.load import load_target
from kernels_pallas.dispatch import Choice, Device, pick

_MIN_GPU_JAX = (0, 11, 1)
_USEFUL_ACCEPT_LENGTH = 1.2  # of a trained drafter; below it something does not fit


@dataclass(frozen=True, slots=True)
class Assembled:
    """A ready engine and how it came about.

    choices: (what, value, reason) of everything that was decided.
    lossless: False only with `force_accept`.
    target, drafter, params: what the engine was built from, for benchmarks.
    """

    engine: Engine
    tokenizer: Tokenizer
    geometry: Geometry
    model_config: ModelConfig
    drafter_name: str
    choices: tuple[tuple[str, str, str], ...]
    lossless: bool
    target: Target
    drafter: Drafter
    params: ModelParams


class OpenedModel(NamedTuple):
    """A model whose headers and tokenizer are read, but no weights yet."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer


def open_model(
    config: EngineConfig, *, cache_dir: Path, on_progress: Progress = no_progress
) -> OpenedModel:
    """Finds or fetches the model that `config` names.

    Raises:
        ModelFileError: there is no such model, or jaxspec cannot use it.
    """
    files = find_model(
        config.model, cache_dir=cache_dir, revision=config.revision, progress=on_progress
    )
    checkpoint = open_checkpoint(files)
    return OpenedModel(
        checkpoint, load_tokenizer(checkpoint.tokenizer_source, name=checkpoint.name)
    )


def assemble(
    config: EngineConfig,
    *,
    cache_dir: Path,
    on_progress: Progress = no_progress,
    opened: OpenedModel | None = None,
    detokenize: bool = True,
) -> Assembled:
    """Loads the model and drafter and builds the engine; compiles nothing yet.

    cache_dir: keeps models that come from a package index. opened: the model that `config` names,
    where it is open already. detokenize: False for outputs of token ids alone, which cost the
    host less.

    Raises:
        ConfigError, ModelFileError, UnsupportedKernel: what cannot be met, and the remedy.
    """
    device = Device.current()
    refuse_old_gpu_jax(device.platform, jax.__version_info__)
    opened = opened or open_model(config, cache_dir=cache_dir, on_progress=on_progress)
    # What can be refused by headers alone, before the minutes that weights may take.
    check_model_len(config, opened.checkpoint.config.max_position_embeddings)
    pick("accept", requested=config.kernels, device=device)
    if config.drafter != "auto":
        _, checkpoint = locate_drafter(config, progress=on_progress)
        if checkpoint is not None:  # found: the hub is not asked again
            config = replace(config, drafter=str(checkpoint))
    dtype, dtype_reason = choose_dtype(config.dtype, device)
    loaded = Loaded(
        *opened,
        target_params=load_target(opened.checkpoint, dtype, progress=on_progress),
        dtype=dtype,
        dtype_reason=dtype_reason,
        device=device,
        detokenize=detokenize,
    )
    if config.drafter != "auto":
        return _build(config, loaded, "asked for", on_progress)
    shipped = shipped_drafter(config.model)
    chain = dict(block_size=None, draft_window=None, tree_nodes=None, tree_topk=None)
    plain = replace(config, drafter="none", **chain)
    if shipped is None or config.force_accept is not None:
        reason = f"auto: no drafter is shipped for {config.model}"
        return _build(plain, loaded, reason, on_progress)
    drafting = replace(config, drafter=str(shipped.path))
    memory, key = cache_dir / "auto.json", _machine(drafting, loaded, shipped)
    times = remembered_times(memory, key, lambda: _measure(drafting, loaded))
    verdict = judge(times, shipped.accept_length)
    chosen = drafting if verdict.pays else plain
    return _build(chosen, loaded, verdict.reason, on_progress, StepWatch(memory, key))


class Loaded(NamedTuple):
    """A model on the device, for whatever engine is built around it."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    target_params: TargetParams
    dtype: str
    dtype_reason: str
    device: Device
    detokenize: bool


def _machine(drafting: EngineConfig, loaded: Loaded, shipped: Shipped) -> str:
    """What step times hold for."""
    device, length = loaded.device.kind, drafting.max_model_len
    made = f"{loaded.dtype} {device} jax {jax.__version__} {drafting.kernels}"
    return f"{shipped.folder} {made} {length}"


def _measure(drafting: EngineConfig, loaded: Loaded) -> StepTimes:
    """Measures a step with the drafter and one without.

    At the sizes asked for: what is compiled here is in the compilation cache when the engine that
    is chosen needs it.
    """
    both = replace(drafting, adaptive=True, accept_rule="keyed")
    times = measure_steps(_build(both, loaded, "", no_progress).engine)
    gc.collect()  # its KV, before there is other
    return times


def _build(
    config: EngineConfig,
    loaded: Loaded,
    drafter_reason: str,
    on_progress: Progress,
    watch_step: WatchStep = unwatched,
) -> Assembled:
    """Builds the engine with the drafter that `config` names."""
    checkpoint, tokenizer, device = loaded.checkpoint, loaded.tokenizer, loaded.device
    model, dtype = checkpoint.config, loaded.dtype
    drafter_name, plan = plan_drafter(
        config, model, dtype, token_id=tokenizer.token_id, progress=on_progress
    )
    built = build_engine(
        config,
        model,
        loaded.target_params,
        plan,
        dtype=dtype,
        device=device,
        make_detokenizer=_detokenizers(tokenizer) if loaded.detokenize else None,
        tokenizer=tokenizer,
        watch_step=watch_step,
    )
    choices = (
        ("model", checkpoint.name, str(checkpoint.path)),
        ("device", device.kind, f"jax {jax.__version__}"),
        ("dtype", dtype, loaded.dtype_reason),
        ("drafter", drafter_name, drafter_reason),
        *((op, choice.name, choice.reason) for op, choice in built.kernels.items()),
        *_sizes(built.geometry, built.kv_bytes_per_token),
    )
    return Assembled(
        built.engine,
        tokenizer,
        built.geometry,
        model,
        drafter_name,
        choices,
        lossless=config.force_accept is None,
        target=built.target,
        drafter=built.drafter,
        params=built.params,
    )


class BuiltEngine(NamedTuple):
    """An engine and what it was built from; kernels: of each op, with the reason."""

    engine: Engine
    geometry: Geometry
    target: Target
    drafter: Drafter
    params: ModelParams
    kernels: dict[str, Choice]
    kv_bytes_per_token: int


def build_engine(
    config: EngineConfig,
    model: ModelConfig,
    target_params: TargetParams,
    plan: DrafterPlan,
    *,
    dtype: str,
    device: Device,
    make_detokenizer: Callable[[Request], Detokenizer] | None,
    tokenizer: Tokenizer | None = None,
    watch_step: WatchStep = unwatched,
) -> BuiltEngine:
    """Builds the engine of a model and a drafter whose weights are on the device already.

    Raises:
        ConfigError, UnsupportedKernel: settings that cannot be met.
    """
    params = ModelParams(target=target_params, drafter=plan.params)
    parts = build_parts(
        config, model, plan, params, dtype=dtype, device=device, memory_bytes=_memory_bytes()
    )
    geometry, target, drafter, kernels, kv_bytes_per_token = parts
    self_test_kernels(geometry, model, plan)
    widths = (drafter.block_size,)
    if config.adaptive and config.force_accept is None and config.accept_rule == "keyed":
        widths = widths_of(drafter)
    engine = Engine(
        geometry,
        params,
        init_state(geometry, target, drafter),
        {mode: build_steps(geometry, target, drafter, mode=mode) for mode in Mode},
        pace=Pace(widths, drafter.max_accept_length - 1) if len(widths) > 1 else None,
        narrow_steps=build_narrow_steps(geometry, target, drafter, widths[1:]),
        watch_step=watch_step,
        make_state=functools.partial(init_state, geometry, target, drafter),
        eos_token_ids=model.eos_token_ids,
        make_detokenizer=make_detokenizer,
        tokenizer=tokenizer,
        grammars=grammars_of(tokenizer, model) if tokenizer is not None else None,
        overlap=config.overlap,
        prefix_lookahead=drafter.kv_lookahead if config.enable_prefix_caching else None,
        seed=config.seed,
        expected_accept_length=_USEFUL_ACCEPT_LENGTH if plan.feature_layers else None,
    )
    return BuiltEngine(engine, geometry, target, drafter, params, kernels, kv_bytes_per_token)


def refuse_old_gpu_jax(platform: str, version: tuple[int, ...]) -> None:
    """Raises ConfigError for a jax that miscompiles rotary embeddings on GPUs (jax#40588)."""
    if platform == "gpu" and version < _MIN_GPU_JAX:
        have, need = (".".join(map(str, v)) for v in (version, _MIN_GPU_JAX))
        raise ConfigError(
            f"jax {have} miscompiles nested concatenates on GPUs; install jax {need} or later "
            "(pip install -e '.[gpu]' on Python 3.12)"
        )


def choose_dtype(wanted: str, device: Device) -> tuple[str, str]:
    """The dtype of weights and KV, and why."""
    if wanted != "auto":
        return wanted, "asked for"
    if device.platform != "gpu":
        return "float32", "auto: CPUs compute in float32"
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        return "float16", f"auto: {device.kind} has no bfloat16"
    return "bfloat16", "auto: GPUs read half the bytes"


def _memory_bytes() -> int | None:
    stats: Callable[[], dict | None] = jax.devices()[0].memory_stats
    return (stats() or {}).get("bytes_limit")


def grammars_of(tokenizer: Tokenizer, model: ModelConfig) -> Grammars:
    """Grammars over a model's vocabulary."""
    return Grammars.of_vocabulary(
        tokenizer.to_json, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )


def _detokenizers(tokenizer: Tokenizer) -> Callable[[Request], Detokenizer]:
    def make(request: Request) -> Detokenizer:
        return tokenizer.detokenizer(skip_special_tokens=request.params.skip_special_tokens)

    return make


def _sizes(geometry: Geometry, kv_bytes_per_token: int) -> tuple[tuple[str, str, str], ...]:
    tokens = (geometry.num_pages - 1) * geometry.page_size
    gigabytes = tokens * kv_bytes_per_token / 1e9
    return (
        (
            "kv pool",
            f"{geometry.num_pages - 1} pages of {geometry.page_size} tokens",
            f"{tokens} tokens, {gigabytes:.2f} GB",
        ),
        ("max_model_len", str(geometry.max_model_len), f"{geometry.num_slots} requests at once"),
        ("block_size", str(geometry.block_size), "tokens a verify step takes"),
        (
            "buckets",
            f"decode {geometry.batch_buckets}",
            f"prefill {geometry.prefill_buckets} tiles of {geometry.prefill_tile}",
        ),
    )
