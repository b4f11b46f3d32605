"""The compiled programs of an engine, and how the host calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config import Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.narrow import narrow
from jaxspec.engine.decode_step import build_decode_loop, build_decode_step, build_split_decode_step
from jaxspec.engine.prefill_step import build_prefill_step
from jaxspec.engine.staged_step import StagedStep, build_staged_step
from jaxspec.engine.state import EngineState
from jaxspec.mode import Mode
from jaxspec.models.base import Target

# (params, DONATED state, packed i32[B, W]) -> (state, packed output)
Step = Callable[[ModelParams, EngineState, np.ndarray], tuple[EngineState, Any]]


class Steps(NamedTuple):
    """One family of programs, of one mode; a program a bucket."""

    prefill: Step
    decode: Step | StagedStep  # staged in modes with grammars
    decode_loop: Step | None  # `geometry.decode_steps` at once; None where that is 1


def build_steps(
    geometry: Geometry, target: Target, drafter: Drafter, *, mode: Mode, split: bool = False
) -> Steps:
    """Builds the programs; compiling happens at the first call of each shape.

    split: verification and ingest as two programs instead of one.
    """
    build = build_split_decode_step if split else build_decode_step
    if mode.constrained:
        # The host is needed in the middle of a step.
        decode = build_staged_step(geometry, target, drafter, mode=mode)
    else:
        decode = build(geometry, target, drafter, mode=mode)
    loop = None
    if geometry.decode_steps > 1 and not mode.constrained:
        loop = build_decode_loop(
            geometry, target, drafter, num_steps=geometry.decode_steps, mode=mode
        )
    return Steps(
        prefill=build_prefill_step(geometry, target, drafter, mode=mode),
        decode=decode,
        decode_loop=loop,
    )


def build_narrow_steps(
    geometry: Geometry, target: Target, drafter: Drafter, widths: Sequence[int]
) -> dict[int, dict[Mode, Steps]]:
    """The programs that verify fewer drafts, by width; their prefill is that of all drafts."""
    return {
        width: {
            mode: build_steps(
                geometry, target, narrow(drafter, width, geometry.page_size), mode=mode
            )
            for mode in Mode
        }
        for width in widths
    }
