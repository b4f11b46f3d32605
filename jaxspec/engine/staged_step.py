"""A decode step for grammars: what is allowed is worked out by the host while the target runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxspec.config import Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.engine.decode_step import Drafted, TargetLogits, build_fine_stages
from jaxspec.engine.state import EngineState
from jaxspec.mode import Mode
from jaxspec.models.base import Target

# (tokens i32[B, N] of the blocks, parents i32[B, N] or None) -> u32[B, N, ceil(V / 32)]
Allow = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
StagedStep = Callable[[ModelParams, EngineState, np.ndarray, Allow], tuple[EngineState, jax.Array]]


@functools.lru_cache(maxsize=64)
def build_staged_step(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode
) -> StagedStep:
    """Builds `build_decode_step` as three programs: draft | target forward | accept and ingest.

    `allow` is called once the target's pass has been dispatched, and the drafts are known.
    """
    stages = build_fine_stages(geometry, target, drafter, mode=mode)

    def accept_and_ingest(
        params: ModelParams,
        state: EngineState,
        drafted: Drafted,
        judged: TargetLogits,
        allowed: jax.Array,
    ) -> tuple[EngineState, jax.Array]:
        state, pending, output = stages.accept(state, drafted, judged, allowed)
        return stages.ingest(params, state, pending), output

    draft = jax.jit(stages.draft, donate_argnames="state")
    forward = jax.jit(stages.target, donate_argnames="state")
    accept = jax.jit(accept_and_ingest, donate_argnames="state")

    def staged_step(
        params: ModelParams, state: EngineState, packed: np.ndarray, allow: Allow
    ) -> tuple[EngineState, jax.Array]:
        state, drafted = draft(params, state, packed)
        block = drafted.draft
        known = [each for each in (block.tokens, block.parents) if each is not None]
        for each in known:
            each.copy_to_host_async()
        state, judged = forward(params, state, drafted)
        tokens, *parents = (np.asarray(each) for each in known)
        allowed = allow(tokens.astype(np.int32), parents[0] if parents else None)
        return accept(params, state, drafted, judged, allowed)

    return staged_step
