"""The weights of a DFlash drafter: what `weights.load` fills and `dflash.py` computes with."""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.models.layers import LayerParams


@flax.struct.dataclass
class ContextParams:
    """Copies of the layers' K and V rows, all layers' in one matrix: what ingesting reads."""

    kv: jax.Array  # [L * 2J * D, E]
    kv_bias: jax.Array | None  # [L * 2J * D]


@flax.struct.dataclass
class DFlashParams:
    """A DFlash drafter's own weights: no embedding and no head, those are the target's."""

    fc: jax.Array  # [E, F * E_target]
    hidden_norm: jax.Array  # [E] norm of the context stream
    norm: jax.Array  # [E] norm before the head
    input_norms: jax.Array  # [L, E]
    post_norms: jax.Array  # [L, E]
    q_norms: jax.Array  # [L, D]
    k_norms: jax.Array  # [L, D]
    layers: tuple[LayerParams, ...]
    context: ContextParams | None = None  # where the weights do not change; see `dflash.py`
