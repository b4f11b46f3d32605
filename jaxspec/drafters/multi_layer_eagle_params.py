"""The weights of a multi-layer EAGLE drafter: what the loader fills and its functions read."""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.models.layers import LayerParams


@flax.struct.dataclass
class MultiLayerEagleParams:
    """N drafter layers' own weights: no embedding and no head, those are the target's."""

    embed_norms: jax.Array  # [L, E] of the token's embedding
    hidden_norms: jax.Array  # [L, E] of the hidden state
    mixes: jax.Array  # [L, E, 2E] of embedding and hidden state
    norms: jax.Array  # [L, E] before the head
    input_norms: jax.Array  # [L, E]
    post_norms: jax.Array  # [L, E]
    layers: tuple[LayerParams, ...]
    q_norms: jax.Array | None = None  # [L, D]
    k_norms: jax.Array | None = None  # [L, D]
