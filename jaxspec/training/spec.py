"""Everything static about an optimiser step. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.models.config import ModelConfig
from jaxspec.training.loss import LossSpec


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Everything static about a step.

    num_anchors: A, blocks a row. micro_batches: parts that a step's rows are taken in, one after
    another. attention: of the target, see `build_dense_forward`. chunk: see `block_attention`.
    ema: decay of the running mean of the weights, 0 for none.
    """

    target: ModelConfig
    drafter: DFlashConfig | EagleConfig
    loss: LossSpec
    num_anchors: int
    micro_batches: int = 1
    compute_dtype: str = "bfloat16"
    attention: str = "xla"
    chunk: int = 1 << 30
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that the drafter reads."""
        if isinstance(self.drafter, EagleConfig):
            return self.drafter.feature_layers
        return self.drafter.target_layer_ids
