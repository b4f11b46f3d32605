"""What a DFlash checkpoint says about a drafter, parsed once into a hashable value. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.models.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and constants of a DFlash drafter.

    Embedding and output head are the target's, so `hidden_size` and `vocab_size` are the target's
    too; `target_hidden_size` is the width of one feature layer, the input of `fc`.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int  # N the drafter was trained with: the bonus token and N - 1 masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based target layers whose outputs it reads, in order
    layer_windows: tuple[int | None, ...]  # one a layer; None sees all
    layer_causal: tuple[bool, ...]  # one a layer
    max_position_embeddings: int
    vocab_size: int
    target_hidden_size: int
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False

    @classmethod
    def like(
        cls,
        target: ModelConfig,
        *,
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...],
    ) -> DFlashConfig:
        """A drafter of the target's own proportions, all layers full and bidirectional.

        As those of the paper are (arXiv 2602.06036).
        """
        return cls(
            **target.proportions(),
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids,
            layer_windows=(None,) * num_layers,
            layer_causal=(False,) * num_layers,
        )
