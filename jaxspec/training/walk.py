"""Accept lengths as serving would meet them, from one pass over text that the target wrote."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.training.anchors import TokenRows
from jaxspec.training.report import Metrics, ratios
from jaxspec.training.rows import PackedRows
from jaxspec.training.spec import StepSpec
from jaxspec.training.step import DrafterParams, Frozen, build_measure

_ROWS_AT_ONCE = 8


def walk(rows: PackedRows, lengths: np.ndarray) -> tuple[int, int]:
    """Serves the answers of packed rows in thought: each verify step goes on where the last ended.

    Positions that are easy to guess are passed over in long strides, so that the mean over all
    positions, or random ones, is far above what serving yields.

    Example: an answer of tokens 5..12 with lengths 3 at 5, 1 at 8 and 8 at 9: three steps, and
    7 tokens after the first.

    Args:
        rows: greedy answers of the target.
        lengths: f32[R, S] accept length of a block that begins at each token.

    Returns:
        (tokens after the first of each answer, verify steps).
    """
    tokens = steps = 0
    for row in range(len(rows)):
        edges = np.diff(np.pad(rows.supervised[row].astype(np.int8), 1))
        for first, end in zip(np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0], strict=True):
            at = int(first)
            while at < end - 1:
                at += int(lengths[row, at])
                steps += 1
            tokens += int(end) - 1 - int(first)
    return tokens, steps


def build_walk(
    spec: StepSpec, frozen: Frozen, held_out: PackedRows
) -> Callable[[DrafterParams], Metrics]:
    """Builds (drafter's params) -> metrics over all positions of the held-out rows.

    `simulated_accept_length` is that of a walk; slot accuracies and loss are of every position.
    """
    measure = build_measure(spec)
    num_rows, row_len = held_out.token_ids.shape
    size = min(_ROWS_AT_ONCE, num_rows)
    held_out = held_out.take(np.arange(num_rows - num_rows % size))
    parts = [
        TokenRows.from_host(held_out.take(np.arange(start, start + size)))
        for start in range(0, len(held_out), size)
    ]
    width = min(spec.num_anchors, row_len)
    starts = [min(start, row_len - width) for start in range(0, row_len, width)]
    indices = [
        jnp.asarray(np.tile(np.arange(start, start + width, dtype=np.int32), (size, 1)))
        for start in starts
    ]

    def run(params: DrafterParams) -> Metrics:
        results = [[measure(params, frozen, part, index) for index in indices] for part in parts]
        sums = jax.tree.map(
            lambda *leaves: jnp.stack(leaves).sum(0), *(s for row in results for s, _ in row)
        )
        lengths = np.ones(held_out.token_ids.shape, np.float32)
        for number, row in enumerate(results):
            for start, (_, some) in zip(starts, row, strict=True):
                lengths[number * size : (number + 1) * size, start : start + width] = some
        tokens, steps = walk(held_out, lengths)
        return {**ratios(sums), "simulated_accept_length": tokens / max(steps, 1)}

    return run
