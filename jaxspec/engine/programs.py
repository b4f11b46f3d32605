"""The programs of an engine, and what they keep on the device: its state and the rows of edits."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TypingSequence
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from jaxspec.config import Geometry
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.edits import build_start_edits, pack_edits, pack_start
from jaxspec.engine.result_room import make_room_for_results
from jaxspec.engine.sequence import Sequence
from jaxspec.engine.staged_step import Allow, StagedStep
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import Step, Steps
from jaxspec.logit_edits import EditRows
from jaxspec.mode import Mode


class Programs:
    """Calls the program of a kind, mode and width; each takes the state over and hands it on.

    steps: the programs of each mode. narrow_steps: those that verify fewer tokens a row.
    """

    def __init__(
        self,
        geometry: Geometry,
        params: ModelParams,
        state: EngineState,
        steps: dict[Mode, Steps],
        narrow_steps: Mapping[int, dict[Mode, Steps]] | None = None,
    ):
        self.params, self.steps = params, steps
        self.state: EngineState | None = state  # None: lost with the device
        self.edits: EditRows | None = None  # from the first request on that needs them
        self._geometry = geometry
        self._narrow_steps = narrow_steps or {}
        self._stale_edits: set[int] = set()  # slots that hold what their last owner asked for
        self._room = make_room_for_results() if jax.default_backend() == "gpu" else []

    @property
    def is_state_lost(self) -> bool:
        """True once a program has taken the state, or the rows of edits, over and failed."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves((self.state, self.edits)))

    def drop(self) -> None:
        """Forgets what the device has lost; `state` is to be set anew."""
        self.state = self.edits = None

    def call(
        self, kind: str, packed: np.ndarray | jax.Array, mode: Mode, width: int, allow: Allow
    ) -> jax.Array:
        """Runs a program; those of modes without edits never see the edits' rows.

        width: tokens verified a row. allow: asked in modes with grammars alone.
        """
        step = self._program(kind, mode, width)
        state, output = step(*self._arguments(kind, packed, mode, allow))
        if mode.edits:
            self.edits, state = state.edits, state.replace(edits=None)
        self.state = state
        return output

    def lower(
        self, kind: str, packed: np.ndarray | jax.Array, mode: Mode, width: int, allow: Allow
    ) -> TypingSequence[Lowered]:
        """What `call` would compile; nothing where a step is no jitted function."""
        step = self._program(kind, mode, width)
        arguments = self._arguments(kind, packed, mode, allow)
        if isinstance(step, StagedStep):
            return step.lower(*arguments)
        return [step.lower(*arguments)] if hasattr(step, "lower") else []

    def write_edits(self, slot: int, edits: np.ndarray, seq: Sequence | None = None) -> None:
        """Writes a slot's edits, for a request that begins there, or neutral ones."""
        if self.edits is None:
            size = self._geometry.num_slots + 1
            self.edits = EditRows.neutral(size, self._geometry.vocab_size)
        self._stale_edits.discard(slot)
        texts = (seq.request.prompt_token_ids, seq.output_ids) if seq else ((), ())
        packed = pack_start(edits, self._geometry, slot, *texts)
        self.edits = build_start_edits(self._geometry)(self.edits, packed)

    def leave_edits(self, slot: int) -> None:
        """Notes that a slot's edits are those of a request that has left it."""
        self._stale_edits.add(slot)

    def _program(self, kind: str, mode: Mode, width: int) -> Step | StagedStep:
        is_narrow = kind != "prefill" and width < self._geometry.block_size
        steps = self._narrow_steps[width] if is_narrow else self.steps
        return getattr(steps[mode], kind)

    def _arguments(
        self, kind: str, packed: np.ndarray | jax.Array, mode: Mode, allow: Allow
    ) -> tuple[Any, ...]:
        state, asked = self.state, ()
        if mode.edits:
            self._freshen_edits()
            state = state.replace(edits=self.edits)
        if mode.constrained and kind == "decode":
            asked = (allow,)
        elif mode.constrained:
            words = allow(np.zeros((len(packed), 1), np.int32), None).view(np.int32)
            packed = np.concatenate([packed, words[:, 0]], axis=1)
        return self.params, state, packed, *asked

    def _freshen_edits(self) -> None:
        """Makes the rows of slots neutral that no longer belong to who asked for edits."""
        if self.edits is None:
            self.write_edits(0, pack_edits(self._geometry))
        for slot in list(self._stale_edits):
            self.write_edits(slot, pack_edits(self._geometry))
