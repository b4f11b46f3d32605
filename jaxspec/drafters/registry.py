"""Which drafters there are, and which one a setting means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.base import DrafterPlan, DrafterSetup
from jaxspec.drafters.dflash import plan_dflash
from jaxspec.drafters.eagle import plan_eagle
from jaxspec.drafters.multi_layer_eagle import plan_multi_layer_eagle
from jaxspec.drafters.ngram import plan_ngram
from jaxspec.drafters.none import plan_none
from jaxspec.drafters.shipped import shipped_checkpoint
from jaxspec.models.config import ModelConfig
from jaxspec.weights.drafter_json import detect_drafter
from jaxspec.weights.files import Progress, no_progress
from jaxspec.weights.hub import find_drafter

DRAFTERS: dict[str, Callable[[DrafterSetup], DrafterPlan]] = {
    "none": plan_none,
    "ngram": plan_ngram,
    "dflash": plan_dflash,
    "eagle": plan_eagle,
    "eagle3": plan_eagle,
    "multi_layer_eagle": plan_multi_layer_eagle,
}
MODEL_FREE = ("none", "ngram")  # named by themselves; the others by their checkpoint


def plan_drafter(
    config: EngineConfig,
    target: ModelConfig,
    dtype: str,
    *,
    token_id: Callable[[str], int | None] | None = None,
    progress: Progress = no_progress,
) -> tuple[str, DrafterPlan]:
    """Loads the drafter that the settings name: (kind, plan).

    token_id: the target's tokenizer, for checkpoints that name a token by its text.

    Raises:
        ModelFileError: the checkpoint is missing, unsupported or unfit for the target.
        ConfigError: the settings do not suit the drafter.
    """
    name, checkpoint = locate_drafter(config, progress=progress)
    plan = DRAFTERS[name](DrafterSetup(config, target, dtype, checkpoint, token_id))
    if config.tree_nodes is not None and not plan.takes_trees:
        raise ConfigError(
            f"tree_nodes is {config.tree_nodes}, but the drafter {name} drafts chains only; leave "
            "it out, or name a DFlash or EAGLE checkpoint"
        )
    return name, plan


def locate_drafter(
    config: EngineConfig, *, progress: Progress = no_progress
) -> tuple[str, Path | None]:
    """The kind of the drafter that the settings name, and its checkpoint where it has one.

    Raises:
        ModelFileError: there is no such checkpoint, or its kind is not supported.
    """
    assert config.drafter != "auto", "assemble decides what auto means"
    if config.drafter in MODEL_FREE:
        return config.drafter, None
    checkpoint = shipped_checkpoint(config.drafter, config.model)
    checkpoint = checkpoint or find_drafter(config.drafter, progress=progress)
    return detect_drafter(checkpoint), checkpoint
