"""The kinds of drafters that can be trained: what differs between them, outside of the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    check_same_shape,
    choose_draft_vocabulary,
    choose_mask_token,
    drafter_config,
    eagle3_config,
)
from jaxspec.training.step import DrafterParams, Frozen
from jaxspec.weights.load import load_dflash


class Design(NamedTuple):
    """A drafter, decided from the target and the data before any weights are loaded.

    choices: what was decided and why. target_ids: of a vocabulary of its own. start: weights as
    they are served, to start from in place of fresh ones.
    """

    drafter: DFlashConfig | EagleConfig
    choices: tuple[Choice, ...]
    target_ids: np.ndarray | None = None
    start: DrafterParams | None = None


class Recipe(NamedTuple):
    """One kind of drafter.

    design: (settings, target, conversations) -> Design. freeze: (target's weights, design) -> what
    a step reads and never changes. init: (design, key, frozen) -> weights in float32 to start
    from. export: (weights, design) -> all that the checkpoint holds.
    """

    design: Callable[[Any, OpenedModel, list[Conversation]], Design]
    freeze: Callable[[TargetParams, Design], Frozen]
    init: Callable[[Design, jax.Array, Frozen], DrafterParams]
    export: Callable[[DrafterParams, Design], DrafterParams]


def _design_dflash(
    config: TrainConfig, opened: OpenedModel, conversations: list[Conversation]
) -> Design:
    target = opened.checkpoint.config
    begun = start = None
    if config.init_from is not None:
        token_id = opened.tokenizer.token_id
        begun, start = load_dflash(Path(config.init_from), target, "float32", token_id=token_id)
    if begun is not None and config.mask_token_id is None:
        mask, reason = begun.mask_token_id, f"that of {config.init_from}"
    else:
        mask, reason = choose_mask_token(
            config.mask_token_id, opened.tokenizer, target, conversations
        )
    drafter = drafter_config(config, target, mask)
    if begun is not None:
        check_same_shape(config.init_from, begun, drafter)
    reads = f"reads target layers {drafter.target_layer_ids}"
    return Design(
        drafter,
        (
            ("drafter", f"{drafter.num_layers} layers, block {drafter.block_size}", reads),
            ("mask token", str(mask), reason),
            ("starts from", config.init_from or "fresh weights", ""),
        ),
        start=start,
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


def _init_dflash(design: Design, key: jax.Array, frozen: TargetParams) -> DrafterParams:
    if design.start is not None:
        return design.start
    return dflash.init_params(design.drafter, key, final_norm=frozen.final_norm)


RECIPES: dict[type[TrainConfig], Recipe] = {
    TrainConfig: Recipe(
        design=_design_dflash,
        freeze=lambda target, design: target,
        init=_init_dflash,
        export=lambda params, design: params,
    ),
    Eagle3TrainConfig: Recipe(
        design=_design_eagle3,
        freeze=lambda target, design: eagle.EagleTarget(target, jnp.asarray(design.target_ids)),
        init=lambda design, key, frozen: eagle.init_params(design.drafter, key, frozen),
        export=lambda params, design: params.replace(target_ids=jnp.asarray(design.target_ids)),
    ),
}
