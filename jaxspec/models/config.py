"""What a checkpoint says about a language model, parsed once into a hashable value. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of the rotary wavelengths.

    Source: the `rope_type: "llama3"` entry of Llama 3.1's `config.json`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a dense decoder-only language model (Llama or Qwen3 family)."""

    architecture: str  # "llama" | "qwen3": the key of `models.MODELS`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def proportions(self) -> dict[str, Any]:
        """The fields of a drafter's config that one of this model's own proportions shares."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "target_hidden_size": self.hidden_size,
            "rope_scaling": self.rope_scaling,
        }


Json = dict[str, Any]
