"""A decode step for grammars: what is allowed is worked out by the host while the target runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.stages import Lowered

from jaxspec.config import Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.engine.decode_step import Drafted, Stages, TargetLogits, build_fine_stages
from jaxspec.engine.state import EngineState
from jaxspec.mode import Mode
from jaxspec.models.base import Target

# (tokens i32[B, N] of the blocks, parents i32[B, N] or None) -> u32[B, N, ceil(V / 32)]
Allow = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


class StagedStep:
    """`build_decode_step` as three programs: draft | target forward | accept and ingest."""

    def __init__(self, stages: Stages):
        def accept_and_ingest(
            params: ModelParams,
            state: EngineState,
            drafted: Drafted,
            judged: TargetLogits,
            allowed: jax.Array,
        ) -> tuple[EngineState, jax.Array]:
            state, pending, output = stages.accept(state, drafted, judged, allowed)
            return stages.ingest(params, state, pending), output

        self._draft = jax.jit(stages.draft, donate_argnames="state")
        self._forward = jax.jit(stages.target, donate_argnames="state")
        self._accept = jax.jit(accept_and_ingest, donate_argnames="state")

    def __call__(
        self, params: ModelParams, state: EngineState, packed: jax.Array, allow: Allow
    ) -> tuple[EngineState, jax.Array]:
        """Runs a step; calls `allow` once the target's pass is dispatched and drafts are known."""
        state, drafted = self._draft(params, state, packed)
        block = drafted.draft
        known = [each for each in (block.tokens, block.parents) if each is not None]
        for each in known:
            each.copy_to_host_async()
        state, judged = self._forward(params, state, drafted)
        tokens, *parents = (np.asarray(each) for each in known)
        allowed = allow(tokens.astype(np.int32), parents[0] if parents else None)
        return self._accept(params, state, drafted, judged, allowed)

    def lower(
        self, params: ModelParams, state: EngineState, packed: jax.Array, allow: Allow
    ) -> list[Lowered]:
        """What a call compiles."""
        draft = self._draft.trace(params, state, packed)
        state, drafted = draft.out_info
        forward = self._forward.trace(params, state, drafted)
        state, judged = forward.out_info
        allowed = allow(np.zeros(drafted.draft.tokens.shape, np.int32), None)
        accept = self._accept.trace(params, state, drafted, judged, allowed)
        return [draft.lower(), forward.lower(), accept.lower()]


@functools.lru_cache(maxsize=64)
def build_staged_step(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode
) -> StagedStep:
    """Builds the step; compiling happens at the first call of each shape."""
    return StagedStep(build_fine_stages(geometry, target, drafter, mode=mode))
