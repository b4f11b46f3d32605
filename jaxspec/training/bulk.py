"""Lets the target complete many prompts at once: the engine's programs under a host loop of arrays.

The engine serves: it grows, shares and takes away pages, streams, and is asked about each token.
Here nobody waits for a token. Each slot owns the pages of its longest text for good, and the host
touches tokens in arrays only, so that one process keeps a GPU busy with a thousand answers at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.cache.kv_pages import kv_bytes_per_token
from jaxspec.config import Geometry
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.admission import bucket, request_key
from jaxspec.engine.assemble import Assembled
from jaxspec.engine.dispatch import pack_decode
from jaxspec.engine.draft_input import DraftInput
from jaxspec.engine.state import (
    EngineState,
    StepOutput,
    empty_prefill_batch,
    init_state,
    pack_limits,
    pack_prefill_tile,
)
from jaxspec.engine.steps import Steps, build_steps
from jaxspec.future_map import describe_errors
from jaxspec.mode import Mode
from jaxspec.request import SamplingParams
from jaxspec.training.filters import loop_start

# Prompts are let in by bursts: a prefill takes about as long as some decode steps, however small.
_BURST = 16  # one in so many slots is free before more are let in
_LOOP_CHECK = 64  # tokens between two looks for a loop
_MEMORY_SHARE = {"gpu": 0.85}  # of what is free: the rest is for activations, or for others
_LOGITS = 4  # arrays of the logits' size that a step holds
_F32 = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """One completion to make.

    stop_loops: end a text that repeats itself, see `filters.loop_start`, instead of letting it go
    on to its limit. then: what to do with it; the caller's, the target does not look at it.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    stop_loops: bool = False
    then: Callable[[Completed], None] | None = None


class Completed(NamedTuple):
    """What the target wrote. token_ids: i32[n]. ended: at a stop id, which is the last token."""

    wanted: Wanted
    token_ids: np.ndarray
    ended: bool


class _Prefill(NamedTuple):
    output: jax.Array
    rows: np.ndarray  # of the output, where a prompt ends
    slots: np.ndarray  # of these prompts


def build_bulk(assembled: Assembled, *, num_slots: int, decode_steps: int, free_bytes: int) -> Bulk:
    """Builds the target's bulk form; `assembled` may be sized for a single request.

    On a GPU it compiles one prefill and one decode program: nearly all slots are busy until the
    end, and padding costs less than compiling.

    Args:
        assembled: an engine without drafter, its `max_model_len` that of the longest text.
        num_slots: texts at once; fewer where memory asks for it.
        decode_steps: in one dispatch.
        free_bytes: of memory.
    """
    geometry, model = assembled.geometry, assembled.model_config
    platform = jax.default_backend()
    on_gpu = platform == "gpu"
    per_slot = geometry.pages_for(geometry.max_model_len + 2 * decode_steps)
    kv_bytes = kv_bytes_per_token(model, model.num_layers, geometry.dtype)
    slot_bytes = per_slot * geometry.page_size * kv_bytes + _LOGITS * _F32 * model.vocab_size
    num_slots = max(
        1, min(num_slots, int(_MEMORY_SHARE.get(platform, 0.25) * free_bytes) // slot_bytes)
    )
    buckets = (*(1 << i for i in range((num_slots - 1).bit_length())), num_slots)
    geometry = replace(
        geometry,
        num_slots=num_slots,
        num_pages=1 + num_slots * per_slot,
        pages_per_slot=per_slot,
        batch_buckets=buckets[-1:] if on_gpu else buckets,
        prefill_buckets=geometry.prefill_buckets[-1:] if on_gpu else geometry.prefill_buckets,
        decode_steps=decode_steps,
        loop_unroll=1,  # a large batch's step is long, and compiling it takes its time as well
    )
    target, drafter = assembled.target, assembled.drafter
    return Bulk(
        geometry,
        assembled.params,
        build_steps(geometry, target, drafter, mode=Mode.SAMPLED),
        init_state(geometry, target, drafter),
        eos_token_ids=assembled.model_config.eos_token_ids,
    )


class Bulk:
    """Completes prompts with every slot busy.

    geometry: of blocks of one token; a slot's pages hold its longest text. steps: programs that
    sample; greedy rows among others take the highest logit there too.
    """

    def __init__(
        self,
        geometry: Geometry,
        params: ModelParams,
        steps: Steps,
        state: EngineState,
        *,
        eos_token_ids: tuple[int, ...] = (),
    ):
        assert geometry.block_size == 1, "bulk decoding drafts nothing"
        size, width = geometry.num_slots + 1, geometry.pages_per_slot
        self.geometry = geometry
        self._params, self._steps, self._state = params, steps, state
        self._eos = sorted(eos_token_ids)
        self._page_table = np.zeros((size, width), np.int32)
        self._page_table[1:] = 1 + np.arange((size - 1) * width, dtype=np.int32).reshape(-1, width)
        self._tokens = np.zeros((size, geometry.max_model_len + 1), np.int32)
        self._lens = np.zeros(size, np.int32)  # of prompt and output
        self._prompt_lens = np.zeros(size, np.int32)
        self._looked_at = np.zeros(size, np.int32)  # length at the last look for a loop
        self._live = np.zeros(size, bool)
        self._over = np.zeros(size, bool)
        self._owners: list[Wanted | None] = [None] * size
        self._free = deque(range(1, size))
        self._waiting: deque[Wanted] = deque()
        self._prefills: list[_Prefill] = []
        self._decode: tuple[jax.Array, np.ndarray] | None = None  # output, slots
        self._num_started = 0
        self.num_tokens = 0  # written so far

    def add(self, wanted: Wanted) -> None:
        """Queues a completion.

        Raises:
            ValueError: its prompt leaves no room for a token.
        """
        if not 0 < len(wanted.prompt_ids) < self.geometry.max_model_len:
            raise ValueError(
                f"a prompt has {len(wanted.prompt_ids)} tokens; it must have at least one and "
                f"fewer than {self.geometry.max_model_len}"
            )
        self._waiting.append(wanted)

    @property
    def num_waiting(self) -> int:
        """Completions that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Completions that are being written."""
        return int(self._live.sum())

    @property
    def has_unfinished(self) -> bool:
        """True while a completion waits or runs."""
        return bool(self._waiting) or bool(self._live.any())

    def drop_waiting(self) -> None:
        """Forgets what has no slot yet."""
        self._waiting.clear()

    def step(self) -> list[Completed]:
        """Takes what the device has written, gives it more to do, and returns what is complete.

        The device works while the caller looks at the result.

        Raises:
            RuntimeError: the device reported a fault.
        """
        self._land()
        completed = self._collect()
        self._admit()
        self._dispatch_decode()
        self._look_for_loops()
        return completed

    def _land(self) -> None:
        for prefill in self._prefills:
            output = self._read(prefill.output)
            chosen = StepOutput(*(part[:, prefill.rows] for part in output))
            self._append(chosen, prefill.slots)
        self._prefills.clear()
        if self._decode is not None:
            output, slots = self._decode
            output = self._read(output)
            self._append(StepOutput(*(part[:, : len(slots)] for part in output)), slots)
            self._decode = None

    def _read(self, output: jax.Array) -> StepOutput:
        packed = np.asarray(output)
        packed = packed if packed.ndim == 3 else packed[None]
        return StepOutput.unpack(packed, 1, self.geometry.vocab_size)

    def _append(self, output: StepOutput, slots: np.ndarray) -> None:
        """Adds k tokens at most to each slot: arrays [k, n] of slots [n]."""
        if output.errors.any():
            row = int(np.argmax(output.errors.any(0)))
            bits = int(np.bitwise_or.reduce(output.errors[:, row]))
            raise RuntimeError(f"the target failed: {describe_errors(int(slots[row]), bits)}")
        counts = output.num_committed
        at = self._lens[slots] + np.cumsum(counts, 0) - counts
        written = counts > 0
        self._tokens[np.broadcast_to(slots, at.shape)[written], at[written]] = output.tokens[
            ..., 0
        ][written]
        self._lens[slots] += counts.sum(0, dtype=np.int32)
        self._over[slots] |= output.finished.any(0)
        self.num_tokens += int(counts.sum())

    def _collect(self) -> list[Completed]:
        completed = []
        for slot in np.nonzero(self._over & self._live)[0].tolist():
            ids = self._tokens[slot, self._prompt_lens[slot] : self._lens[slot]].copy()
            ended = len(ids) > 0 and int(ids[-1]) in self._eos
            completed.append(Completed(self._owners[slot], ids, ended))
            self._live[slot] = False
            self._owners[slot] = None
            self._free.append(slot)
        return completed

    def _admit(self) -> None:
        """Fills free slots, once there are enough of them, and dispatches the prompts."""
        burst = max(1, self.geometry.num_slots // _BURST)
        if not self._waiting or len(self._free) < min(burst, len(self._waiting)):
            return
        geometry = self.geometry
        size, most = geometry.prefill_tile, geometry.prefill_buckets[-1]
        tiles: list[tuple[int, int, np.ndarray]] = []  # slot, start, limits
        while self._waiting and self._free:
            wanted, slot = self._waiting.popleft(), self._free.popleft()
            limits = self._start(wanted, slot)
            tiles += [(slot, at, limits) for at in range(0, int(self._lens[slot]), size)]
        for start in range(0, len(tiles), most):
            self._dispatch_prefill(tiles[start : start + most])

    def _start(self, wanted: Wanted, slot: int) -> np.ndarray:
        """Gives a completion its slot; returns its `pack_limits`."""
        geometry, params = self.geometry, wanted.params
        prompt_len, max_len = len(wanted.prompt_ids), geometry.max_model_len
        if params.max_tokens is not None:
            max_len = min(max_len, prompt_len + params.max_tokens)
        self._tokens[slot, :prompt_len] = wanted.prompt_ids
        self._lens[slot] = self._prompt_lens[slot] = self._looked_at[slot] = prompt_len
        self._live[slot], self._over[slot] = True, False
        self._owners[slot] = wanted
        self._num_started += 1
        return pack_limits(
            geometry,
            max_len=max_len,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            key=request_key(params.seed, 0, self._num_started),
            stop_ids=[*self._eos, *params.stop_token_ids],
        )

    def _dispatch_prefill(self, tiles: list[tuple[int, int, np.ndarray]]) -> None:
        geometry = self.geometry
        packed = empty_prefill_batch(bucket(len(tiles), geometry.prefill_buckets), geometry)
        final = []
        for row, (slot, start, limits) in enumerate(tiles):
            end = min(start + geometry.prefill_tile, int(self._lens[slot]))
            is_final = end == self._lens[slot]
            pack_prefill_tile(
                packed[row],
                geometry,
                row=slot,
                start=start,
                is_first=start == 0,
                tokens=self._tokens[slot, start:end],
                next_id=None if is_final else int(self._tokens[slot, end]),
                limits_row=limits,
                page_row=self._page_table[slot],
            )
            if is_final:
                final.append((row, slot))
        output = self._call(self._steps.prefill, packed)
        rows, slots = np.array(final, np.int64).reshape(-1, 2).T
        self._prefills.append(_Prefill(output, rows, slots))

    def _dispatch_decode(self) -> None:
        slots = np.nonzero(self._live)[0]
        if not len(slots):
            return
        geometry = self.geometry
        reserved = np.full(len(slots), geometry.pages_per_slot * geometry.page_size, np.int32)
        plan = DraftInput(slots.astype(np.int32), reserved)
        packed = pack_decode(plan, geometry, self._page_table)
        is_loop = geometry.decode_steps > 1
        step = self._steps.decode_loop if is_loop else self._steps.decode
        self._decode = self._call(step, packed), slots

    def _call(self, step: Callable[..., Any], packed: np.ndarray) -> jax.Array:
        self._state, output = step(self._params, self._state, packed)
        output.copy_to_host_async()
        return output

    def _look_for_loops(self) -> None:
        """Ends texts that loop, as far as they are known, once what is on its way has landed."""
        for slot in np.nonzero(self._live & (self._lens - self._looked_at >= _LOOP_CHECK))[0]:
            if not self._owners[slot].stop_loops:
                continue
            self._looked_at[slot] = self._lens[slot]
            ids = self._tokens[slot, self._prompt_lens[slot] : self._lens[slot]]
            self._over[slot] = loop_start(ids) is not None


def complete(bulk: Bulk, wanted: Sequence[Wanted]) -> list[Completed]:
    """Makes all completions; results in the order of `wanted`."""
    places = {id(each): place for place, each in enumerate(wanted)}
    results: list[Completed | None] = [None] * len(wanted)
    for each in wanted:
        bulk.add(each)
    while bulk.has_unfinished:
        for completed in bulk.step():
            results[places[id(completed.wanted)]] = completed
    return results
