"""Trains a drafter: from data and a target to a checkpoint folder that the engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import OpenedModel, open_model, refuse_old_gpu_jax
from jaxspec.training.anchors import TokenRows
from jaxspec.training.card import CardFacts, model_card
from jaxspec.training.checkpoint import Checkpoints, check_same_run
from jaxspec.training.config import EPOCHS, TrainConfig, TrainingError, resume_command
from jaxspec.training.conversations import HELD_OUT, TRAIN, load_conversations, load_meta
from jaxspec.training.export import export_drafter
from jaxspec.training.loop import Best, Tools, run_steps
from jaxspec.training.loss import LossSpec
from jaxspec.training.plan import (
    estimate,
    fit_to_memory,
    free_memory,
    measure_flops_per_s,
    seconds_a_step,
)
from jaxspec.training.recipes import RECIPES, Design
from jaxspec.training.report import (
    Metrics,
    Report,
    plot_metrics,
    read_metrics,
    trim_metrics,
)
from jaxspec.training.rows import Conversation, PackedRows, pack_rows
from jaxspec.training.schedule import Horizon
from jaxspec.training.setup import (
    Choice,
    choose_attention,
    choose_compute_dtype,
)
from jaxspec.training.spec import StepSpec
from jaxspec.training.step import (
    DrafterParams,
    init_train_state,
    measure_feature_scale,
    served_params,
)
from jaxspec.weights.files import Progress, no_progress
from jaxspec.weights.load import load_target
from kernels_pallas.dispatch import Device

_SCALE_ROWS = 8  # that the size of features is taken from
# A resumed run may differ in these; everything else decides what it computes.
_FREE = (
    "data",
    "output",
    "resume",
    "dry_run",
    "save_minutes",
    "measure_every",
    "model",
    "attention",
    "init_from",
)


@dataclass(frozen=True, slots=True)
class TrainData:
    """Packed rows to learn from and to measure on, and what the data says of itself."""

    train: PackedRows
    held_out: PackedRows | None
    meta: Mapping[str, Any]
    conversations: list[Conversation]


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """All that was decided before the weights are loaded."""

    spec: StepSpec
    design: Design
    choices: tuple[Choice, ...]
    total_steps: int | None  # None: fitted to the wall time
    device: Device


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run.

    steps: at which the drafter was best. seconds: of the whole run. held_out: ratios of the
    drafter's measurement, None without held-out data.
    """

    folder: Path
    steps: int
    seconds: float
    held_out: Metrics | None


def train(
    config: TrainConfig, *, cache_dir: Path, on_progress: Progress = no_progress
) -> TrainResult | None:
    """Trains a drafter and writes it to `config.output`; None after a dry run.

    A run that is cut off leaves its last checkpoint there and goes on with `resume`.

    Raises:
        TrainingError, ModelFileError: what cannot be used, and the remedy.
    """
    if not (config.data and config.output):
        missing = "data" if not config.data else "output"
        raise TrainingError(f"--{missing} is missing; name a folder")
    opened = open_model(
        EngineConfig(model=config.model), cache_dir=cache_dir, on_progress=on_progress
    )
    data = load_data(config, opened)
    plan = plan_run(config, opened, data)
    folder = Path(config.output)
    report = Report(folder / "metrics.jsonl")
    try:
        for what, value, reason in plan.choices:
            report.say(f"{what}: {value} ({reason})" if reason else f"{what}: {value}")
        if config.dry_run:
            return None
        return _run(config, plan, data, opened, report, on_progress)
    finally:
        report.close()


def load_data(config: TrainConfig, opened: OpenedModel) -> TrainData:
    """Reads and packs the data folder.

    Raises:
        TrainingError: there is none, or it was made for another vocabulary.
    """
    folder, target = Path(config.data), opened.checkpoint.config
    meta = load_meta(folder)
    if meta["vocab_size"] != target.vocab_size:
        raise TrainingError(
            f"{folder} was made with {meta['model']}, whose vocabulary has {meta['vocab_size']} "
            f"tokens; the target's has {target.vocab_size}: make data with the target itself"
        )
    conversations = load_conversations(folder, TRAIN)
    if not conversations:
        raise TrainingError(f"{folder} holds no conversations; make the data again")
    held_out = load_conversations(folder, HELD_OUT)
    return TrainData(
        pack_rows(conversations, config.row_len, seed=config.seed),
        pack_rows(held_out, config.row_len, seed=0) if held_out else None,
        meta,
        conversations,
    )


def plan_run(config: TrainConfig, opened: OpenedModel, data: TrainData) -> TrainPlan:
    """Decides the drafter, sizes, dtype and micro-batch, and estimates memory and time.

    Raises:
        TrainingError: the target or the data do not suit the drafter.
    """
    device = Device.current()
    refuse_old_gpu_jax(device.platform, jax.__version_info__)
    target = opened.checkpoint.config
    design = RECIPES[type(config)].design(config, opened, data.conversations)
    dtype, dtype_reason = choose_compute_dtype(config.dtype, device.platform)
    attention, attention_reason = choose_attention(
        config.attention, target, dtype, config.row_len, device.platform
    )
    spec = StepSpec(
        target=target,
        drafter=design.drafter,
        loss=LossSpec(
            block_size=config.block_size,
            weighting=config.loss,
            gamma=config.gamma,
            soft_labels=config.soft_labels,
        ),
        num_anchors=config.num_anchors,
        compute_dtype=dtype,
        attention=attention,
        weight_decay=config.weight_decay,
        clip=config.clip,
        ema=config.ema,
    )
    sizes = {"row_len": config.row_len, "batch_rows": config.batch_rows}
    spec = fit_to_memory(
        spec,
        **sizes,
        micro_batch=config.micro_batch,
        free_bytes=free_memory(device.platform),
        platform=device.platform,
    )
    needs = estimate(spec, **sizes)
    rows_at_once = config.batch_rows // spec.micro_batches
    total_steps = config.max_steps
    if total_steps is None and config.max_minutes is None:
        total_steps = max(1, EPOCHS * len(data.train) // config.batch_rows)
    guess = seconds_a_step(needs, measure_flops_per_s(dtype, device.platform))
    minutes = config.max_minutes if total_steps is None else total_steps * guess / 60
    filled = float((data.train.segments > 0).mean())
    choices = (
        ("target", opened.checkpoint.name, str(opened.checkpoint.path)),
        ("device", device.kind, f"jax {jax.__version__}"),
        ("data", f"{len(data.conversations)} conversations", f"{config.data}, {len(data.train)} "
         f"rows of {config.row_len} tokens, {100 * filled:.0f} % filled"),
        *design.choices,
        ("compute in", dtype, dtype_reason),
        ("target's attention", attention, attention_reason),
        ("rows at once", str(rows_at_once), f"{spec.micro_batches} parts of a step of "
         f"{config.batch_rows} rows, {config.num_anchors} blocks each"),
        ("memory", f"{needs.bytes_at(rows_at_once) / 1e9:.1f} GB", "estimated"),
        ("steps", "fitted to the time" if total_steps is None else str(total_steps), ""),
        ("time", f"{minutes:.1f} minutes", "given" if total_steps is None else
         f"estimated, {1e3 * guess:.0f} ms a step"),
        ("if cut off", resume_command(config), ""),
    )  # fmt: skip
    return TrainPlan(spec, design, choices, total_steps, device)


def _run(
    config: TrainConfig,
    plan: TrainPlan,
    data: TrainData,
    opened: OpenedModel,
    report: Report,
    on_progress: Progress,
) -> TrainResult:
    folder = Path(config.output)
    checkpoints = Checkpoints(folder / "checkpoints")
    if checkpoints.last_step is not None and not config.resume:
        raise TrainingError(
            f"{folder} holds a run of {checkpoints.last_step} steps; go on with --resume, or "
            "choose another output"
        )
    target = load_target(opened.checkpoint, plan.spec.compute_dtype, progress=on_progress)
    weights_key, anchors_key = jax.random.split(jax.random.key(config.seed))
    recipe = RECIPES[type(config)]
    frozen = recipe.freeze(target, plan.design)
    params = recipe.init(plan.design, weights_key, frozen)
    some = TokenRows.from_host(data.train.take(np.arange(min(_SCALE_ROWS, len(data.train)))))
    scale = measure_feature_scale(plan.spec, target, some)
    if plan.design.start is not None:
        params = served_params(params, 1.0 / scale)  # as the step has them
    state = init_train_state(plan.spec, params, scale)
    notes = {"run": identity(config, data), "elapsed_s": 0.0, "best": None}
    notes["total_steps"] = plan.total_steps
    if config.resume:
        saved = checkpoints.restore(state)
        check_same_run(saved.notes["run"], notes["run"])
        state, notes = saved.state, saved.notes
        trim_metrics(folder / "metrics.jsonl", int(state.step))
    limit = None if config.max_minutes is None else 60 * config.max_minutes

    def export(params: DrafterParams, best: Best, seconds: float) -> None:
        facts = CardFacts(
            name=folder.name,
            target=opened.checkpoint.name,
            drafter=plan.spec.drafter,
            data=data.meta,
            settings=_shown(config),
            num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
            steps=best.step,
            seconds=seconds,
            device=plan.device.kind,
            held_out=best.held_out,
        )
        params = recipe.export(params, plan.design)
        export_drafter(folder, params, plan.spec.drafter, plan.spec.target, card=model_card(facts))

    tools = Tools(
        plan.spec,
        Horizon(notes["total_steps"], limit),
        report,
        checkpoints,
        frozen,
        notes,
        export,
    )
    best, seconds = run_steps(config, tools, state, data.train, data.held_out, anchors_key)
    plot_metrics(read_metrics(folder / "metrics.jsonl"), folder / "metrics.png")
    checkpoints.close()
    return TrainResult(folder, best.step, seconds, best.held_out)


def identity(config: TrainConfig, data: TrainData) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was cut off."""
    settings = {name: value for name, value in asdict(config).items() if name not in _FREE}
    tokens = int((data.train.segments > 0).sum())
    return {**settings, "rows of data": len(data.train), "tokens of data": tokens}


def _shown(config: TrainConfig) -> dict[str, Any]:
    hidden = ("data", "output", "model", "resume", "dry_run", "save_minutes", "measure_every")
    return {key: value for key, value in asdict(config).items() if key not in hidden}
