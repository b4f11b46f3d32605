"""The kinds of drafters that can be trained: what differs between them, outside of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.engine.assemble import OpenedModel
from jaxspec.models.layers import TargetParams
from jaxspec.training import dflash, eagle
from jaxspec.training.config import Eagle3TrainConfig, TrainConfig
from jaxspec.training.rows import Conversation
from jaxspec.training.setup import (
    Choice,
    choose_draft_vocabulary,
    choose_mask_token,
    drafter_config,
    eagle3_config,
)
from jaxspec.training.step import DrafterParams, Frozen


class Design(NamedTuple):
    """A drafter, decided from the target and the data before any weights are loaded.

    choices: what was decided and why. target_ids: of a vocabulary of its own.
    """

    drafter: DFlashConfig | EagleConfig
    choices: tuple[Choice, ...]
    target_ids: np.ndarray | None = None


class Recipe(NamedTuple):
    """One kind of drafter.

    design: (settings, target, conversations) -> Design. freeze: (target's weights, design) -> what
    a step reads and never changes. init: (design, key, frozen) -> fresh weights in float32.
    export: (weights, design) -> all that the checkpoint holds.
    """

    design: Callable[[Any, OpenedModel, list[Conversation]], Design]
    freeze: Callable[[TargetParams, Design], Frozen]
    init: Callable[[Design, jax.Array, Frozen], DrafterParams]
    export: Callable[[DrafterParams, Design], DrafterParams]


def _design_dflash(
    config: TrainConfig, opened: OpenedModel, conversations: list[Conversation]
) -> Design:
    target = opened.checkpoint.config
    mask, reason = choose_mask_token(config.mask_token_id, opened.tokenizer, target, conversations)
    drafter = drafter_config(config, target, mask)
    reads = f"reads target layers {drafter.target_layer_ids}"
    return Design(
        drafter,
        (
            ("drafter", f"{drafter.num_layers} layers, block {drafter.block_size}", reads),
            ("mask token", str(mask), reason),
        ),
    )


def _design_eagle3(
    config: Eagle3TrainConfig, opened: OpenedModel, conversations: list[Conversation]
) -> Design:
    target = opened.checkpoint.config
    ids = choose_draft_vocabulary(config.draft_vocab_size, target, conversations)
    drafter = eagle3_config(config, target, len(ids))
    held = np.isin(np.concatenate([c.token_ids[c.supervised] for c in conversations]), ids)
    return Design(
        drafter,
        (
            (
                "drafter",
                f"EAGLE-3, unrolled for {config.block_size - 1} drafts",
                f"reads target layers {drafter.feature_layers}",
            ),
            (
                "draft vocabulary",
                f"{len(ids)} of {target.vocab_size} tokens",
                f"{100 * held.mean():.1f} % of the answers' tokens",
            ),
        ),
        ids,
    )


RECIPES: dict[type[TrainConfig], Recipe] = {
    TrainConfig: Recipe(
        design=_design_dflash,
        freeze=lambda target, design: target,
        init=lambda design, key, frozen: dflash.init_params(
            design.drafter, key, final_norm=frozen.final_norm
        ),
        export=lambda params, design: params,
    ),
    Eagle3TrainConfig: Recipe(
        design=_design_eagle3,
        freeze=lambda target, design: eagle.EagleTarget(target, jnp.asarray(design.target_ids)),
        init=lambda design, key, frozen: eagle.init_params(design.drafter, key, frozen),
        export=lambda params, design: params.replace(target_ids=jnp.asarray(design.target_ids)),
    ),
}
