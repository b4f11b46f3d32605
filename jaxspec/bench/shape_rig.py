"""Engines over random weights of a named shape, with only the programs that a run needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.bench.shapes import Shape, plan_shape
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import build_engine
from jaxspec.engine.compile_ahead import compile_side_by_side
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import EngineState, empty_decode_batch, empty_prefill_batch, init_state
from jaxspec.engine.steps import Step, build_steps
from jaxspec.mode import Mode
from jaxspec.models.layers import TargetParams
from jaxspec.request import Request, SamplingParams
from jaxspec.weights.files import Progress
from kernels_pallas.dispatch import Device

_DRAFTS_ACCEPTED = 5  # near what DFlash reaches on Qwen3-8B


class ShapeRig:
    """One drafter beside a target, and the programs of greedy batches.

    batches: the only bucket sizes. split: verification and ingest as two programs, one step a
    dispatch. modes: of batches that the engine can serve beside greedy ones. accept_length: tokens
    that every step commits to every request.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: Shape,
        target: TargetParams,
        *,
        drafter: str,
        dtype: str,
        batches: tuple[int, ...],
        split: bool,
        modes: tuple[Mode, ...] = (),
    ):
        if split:
            config = dataclasses.replace(config, decode_steps=1)
        if drafter == "none":
            config = dataclasses.replace(config, force_accept=None)
        elif config.force_accept is None:
            accepted = min(_DRAFTS_ACCEPTED, shape.block_size(drafter, config) - 1)
            config = dataclasses.replace(config, force_accept=accepted)
        built = build_engine(
            config,
            shape.target,
            target,
            plan_shape(shape, drafter, config, dtype),
            dtype=dtype,
            device=Device.current(),
            make_detokenizer=None,
        )
        self.shape = shape
        self.accept_length = 1 + (config.force_accept or 0)
        self.geometry = dataclasses.replace(
            built.geometry, batch_buckets=tuple(sorted(set(batches)))
        )
        self.params, self.target, self.drafter = built.params, built.target, built.drafter
        self.choices = built.kernels
        self.kv_bytes = built.kv_bytes_per_token * self.geometry.num_pages * self.geometry.page_size
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        self.steps, *others = (
            build_steps(self.geometry, self.target, self.drafter, mode=mode, split=split)
            for mode in (Mode.GREEDY, *modes)
        )
        self._steps_of_others = dict(zip(modes, others, strict=True))
        self.kind = "decode" if self.geometry.decode_steps == 1 else "decode_loop"

    @property
    def step(self) -> Step:
        """The program of a batch that nobody waits beside."""
        return getattr(self.steps, self.kind)

    def engine(self, step: Step, *, overlap: bool, known: Sequence[Request] = ()) -> Engine:
        """An engine with KV of its own that calls `step` instead of its own program.

        known: requests whose prompts it finds in its prefix cache, as far as pages are full. Their
        KV is as random as what random weights would compute, and takes no time.
        """
        steps = self.steps._replace(**{self.kind: step})
        state = init_state(self.geometry, self.target, self.drafter)
        engine = Engine(
            self.geometry,
            self.params,
            fill_kv(state) if known else state,
            {Mode.GREEDY: steps, **self._steps_of_others},
            overlap=overlap,
            prefix_lookahead=self.drafter.kv_lookahead if known else None,
        )
        for request in known:
            engine.remember(request.prompt_token_ids)
        return engine

    def num_unknown(self, prompt_len: int) -> int:
        """Tokens of a known prompt that are computed all the same: those of no full page."""
        size = self.geometry.page_size
        return prompt_len - (prompt_len - 1 - self.drafter.kv_lookahead) // size * size

    def requests(self, count: int, prompt_len: int, max_tokens: int) -> list[Request]:
        """Greedy requests that end at their length alone, with prompts of random ids."""
        rng = np.random.default_rng(0)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = rng.integers(1, self.geometry.vocab_size, (count, prompt_len))
        return [Request(str(i), tuple(row), params) for i, row in enumerate(ids.tolist())]

    def compile(self, prompts: list[tuple[int, int]], on_progress: Progress) -> None:
        """Compiles side by side what will run.

        prompts: (how many, how long) of those that are prefilled together.
        """
        geometry = self.geometry
        state = jax.eval_shape(lambda: init_state(geometry, self.target, self.drafter))
        jobs: list[tuple[Any, np.ndarray]] = []
        for size in geometry.batch_buckets:
            packed = empty_decode_batch(size, geometry)
            jobs += [(step, packed) for step in {self.steps.decode, self.step}]
        for size in sorted(self._prefill_buckets(prompts)):
            jobs.append((self.steps.prefill, empty_prefill_batch(size, geometry)))
        # The split form is a plain function of two programs.
        jobs = [(step, packed) for step, packed in jobs if hasattr(step, "lower")]
        on_progress("compiling", 0, len(jobs))
        compile_side_by_side(
            ([step.lower(self.params, state, packed)] for step, packed in jobs),
            on_compiled=lambda count: on_progress("compiling", count, len(jobs)),
        )

    def _prefill_buckets(self, prompts: list[tuple[int, int]]) -> set[int]:
        buckets = self.geometry.prefill_buckets
        found = set()
        for count, length in prompts:
            left = count * -(-length // self.geometry.prefill_tile)
            while left > 0:
                tiles = min(left, buckets[-1])
                found.add(next(size for size in buckets if size >= tiles))
                left -= tiles
        return found


# Kept though unused, or there were no buffers to update in place, and the KV took twice the memory.
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def fill_kv(state: EngineState) -> EngineState:
    """Numbers from -1 to 1 in place of zeros, which would cost a device less energy to read."""

    def fill(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        last = lax.broadcasted_iota(jnp.uint32, leaf.shape, leaf.ndim - 1)
        first = lax.broadcasted_iota(jnp.uint32, leaf.shape, 0)
        mixed = (last * jnp.uint32(2654435761)) ^ (first * jnp.uint32(2246822519))
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        signed = lax.bitcast_convert_type(mixed, jnp.int32).astype(jnp.float32)
        return (signed * jnp.float32(2.0**-31)).astype(leaf.dtype)

    return state.replace(
        kv=jax.tree.map(fill, state.kv), drafter_state=jax.tree.map(fill, state.drafter_state)
    )


def memory_in_use() -> int | None:
    """Bytes of the device that hold arrays; None where the platform does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use")


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize
