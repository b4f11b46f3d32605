"""The weights of an EAGLE drafter: what the loader fills and `eagle.py` computes with."""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.models.layers import LayerParams


@flax.struct.dataclass
class EagleParams:
    """An EAGLE drafter's own weights; E is its width, Z = 2E of EAGLE-3 and E of EAGLE-1 and 2.

    What is None is not in the checkpoint: then the step is left out, or the target's own serves.
    """

    layer: LayerParams  # qkv [(H + 2J) * D, Z]
    post_norm: jax.Array  # [E] before the MLP
    fc: jax.Array  # EAGLE-3: [E, F * E_target] of the taps; else [E, 2E] of embedding and feature
    fc_bias: jax.Array | None = None  # [E]
    fc_norms: jax.Array | None = None  # [F, E_target] of each tap
    taps_norm: jax.Array | None = None  # [F * E_target] of all taps together
    input_norm: jax.Array | None = None  # [E] of the embedding; EAGLE-3
    hidden_norm: jax.Array | None = None  # [E] of the hidden state; EAGLE-3
    norm: jax.Array | None = None  # [E] before the head; EAGLE-3
    q_norm: jax.Array | None = None  # [D]
    k_norm: jax.Array | None = None  # [D]
    embed: jax.Array | None = None  # [V, E]; None: the target's
    lm_head: jax.Array | None = None  # [V_draft, E]; None: the target's
    target_ids: jax.Array | None = None  # i32[V_draft] the target's id of each draft id; None: same
