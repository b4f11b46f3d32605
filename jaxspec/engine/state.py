"""The engine's state on the device, and the packed arrays that cross between host and device."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Geometry
from jaxspec.drafters.base import Drafter
from jaxspec.future_map import FutureMap, token_dtype
from jaxspec.logit_edits import EditRows
from jaxspec.logprobs import logprob_width
from jaxspec.mode import Mode
from jaxspec.models.base import Target
from jaxspec.sampling import SamplingRows
from jaxspec.verify import Bounds


@flax.struct.dataclass
class Limits:
    """Per slot: where a request ends and how it samples. Leaves [S+1, ...]; row 0 is padding.

    max_lens: i32 tokens of prompt and output at most. stop_ids: i32[., E], padded with V.
    frozen: bool, ended on the device and not yet released by the host, or never owned.
    """

    max_lens: jax.Array
    stop_ids: jax.Array
    frozen: jax.Array
    sampling: SamplingRows

    @classmethod
    def create(cls, num_slots: int, max_stop_ids: int, vocab_size: int) -> Limits:
        """All rows frozen."""
        size = num_slots + 1
        return cls(
            max_lens=jnp.zeros((size,), jnp.int32),
            stop_ids=jnp.full((size, max_stop_ids), vocab_size, jnp.int32),
            frozen=jnp.ones((size,), bool),
            sampling=SamplingRows.greedy(size),
        )

    def of(self, rows: jax.Array) -> Limits:
        """The rows of a batch, leaves [B, ...]."""
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def put(self, rows: jax.Array, values: Limits) -> Limits:
        """Writes a batch's rows; row 0 stays frozen."""
        new = jax.tree.map(lambda leaf, value: leaf.at[rows].set(value), self, values)
        return new.replace(frozen=new.frozen.at[0].set(True))

    def freeze(self, rows: jax.Array, finished: jax.Array) -> Limits:
        """Freezes the rows where `finished`; row 0 stays frozen."""
        return self.replace(frozen=self.frozen.at[rows].set(finished | (rows == 0)))

    @property
    def bounds(self) -> Bounds:
        """What verification clips at."""
        return Bounds(self.max_lens, self.stop_ids, self.frozen)


@flax.struct.dataclass
class EngineState:
    """Everything a step changes: the one donated argument.

    edits: leaves [S+1, ...] in the programs of modes that read them, None in others.
    """

    future_map: FutureMap
    kv: tuple[jax.Array, ...]
    drafter_state: Any
    limits: Limits
    edits: EditRows | None = None


def init_state(geometry: Geometry, target: Target, drafter: Drafter) -> EngineState:
    """Builds the state of an engine without requests; every leaf is a buffer of its own."""
    slots = geometry.num_slots
    return EngineState(
        future_map=FutureMap.create(slots, drafter.init_carry(slots)),
        kv=target.init_kv(geometry.num_pages),
        drafter_state=drafter.init_state(geometry.num_pages, slots, geometry.max_model_len),
        limits=Limits.create(slots, geometry.max_stop_ids, geometry.vocab_size),
    )


class StepOutput(NamedTuple):
    """All the host ever reads of a step, unpacked from one small array.

    tokens: i32[..., B, N]. num_committed, num_accepted, errors: i32[..., B].
    finished: bool[..., B]. logprobs: i32[..., B, n, 2 + 2K] of the first tokens, where the mode has
    them, else n is 0; of a prefill, those behind the tile's tokens follow.
    """

    tokens: np.ndarray
    num_committed: np.ndarray
    num_accepted: np.ndarray
    finished: np.ndarray
    errors: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray, block_size: int, vocab_size: int) -> StepOutput:
        """packed: i32[..., B, N+4+n*(2+2K)], as `kernels_pallas.accept` and `pack_logprobs` pack.

        block_size: N, 1 of a prefill.
        """
        n = block_size
        width = logprob_width(vocab_size)
        return cls(
            packed[..., :n],
            packed[..., n],
            packed[..., n + 1],
            packed[..., n + 2] != 0,
            packed[..., n + 3],
            packed[..., n + 4 :].reshape(*packed.shape[:-1], -1, width),
        )

    def row(self, step: int, row: int) -> StepOutput:
        """One row of one step, from arrays [k, B, ...]."""
        return StepOutput(*(values[step, row] for values in self))


class DecodeBatch(NamedTuple):
    """What the host sends for a decode step: i32[B, 1 + M], one row a request."""

    rows: jax.Array  # i32[B]
    page_table: jax.Array  # i32[B, M]

    @classmethod
    def unpack(cls, packed: jax.Array) -> DecodeBatch:
        """Splits the packed array."""
        return cls(packed[:, 0], packed[:, 1:])


# Columns of a prefill row before its stop ids, page table and tokens.
_ROW, _LEN, _VALID, _FLAGS, _NEXT, _MAX_LEN, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(10)
_KEY = slice(10, 12)
_FIXED = 12
_FIRST, _FINAL = 1, 2  # bits of _FLAGS


class PrefillBatch(NamedTuple):
    """What the host sends for a prefill step, one row a tile of T tokens of one prompt.

    rows: i32[B] slot of the prompt, 0 for padding tiles. lens: i32[B] tokens before the tile.
    num_valid: i32[B] tokens in it. is_first: bool[B] the request's first tile in this slot.
    is_final: bool[B] the prompt ends in it. next_ids: i32[B] the prompt's token after the tile,
    where it is not final. limits: the prompt's, leaves [B, ...].
    page_table: i32[B, M]. token_ids: token_dtype[B, T].
    allowed: u32[B, 1, ceil(V / 32)] a bit a token that may come first, in modes with grammars.
    """

    rows: jax.Array
    lens: jax.Array
    num_valid: jax.Array
    is_first: jax.Array
    is_final: jax.Array
    next_ids: jax.Array
    limits: Limits
    page_table: jax.Array
    token_ids: jax.Array
    allowed: jax.Array | None

    @classmethod
    def unpack(
        cls, packed: jax.Array, geometry: Geometry, mode: Mode = Mode.GREEDY
    ) -> PrefillBatch:
        """Splits the packed i32[B, W] array; floats and keys travel by bit pattern."""
        floats = jax.lax.bitcast_convert_type(packed, jnp.float32)
        stop, table = geometry.max_stop_ids, geometry.pages_per_slot
        rows, lens = packed[:, _ROW], packed[:, _LEN]
        first, allowed = _FIXED + stop + table, None
        if mode.constrained:
            words = packed[:, None, first + geometry.prefill_tile :]
            allowed = jax.lax.bitcast_convert_type(words, jnp.uint32)
        return cls(
            rows=rows,
            lens=lens,
            num_valid=packed[:, _VALID],
            is_first=packed[:, _FLAGS] & _FIRST != 0,
            is_final=packed[:, _FLAGS] & _FINAL != 0,
            next_ids=packed[:, _NEXT],
            limits=Limits(
                max_lens=packed[:, _MAX_LEN],
                stop_ids=packed[:, _FIXED : _FIXED + stop],
                frozen=rows == 0,
                sampling=SamplingRows(
                    temperature=floats[:, _TEMPERATURE],
                    top_k=packed[:, _TOP_K],
                    top_p=floats[:, _TOP_P],
                    min_p=floats[:, _MIN_P],
                    key=jax.lax.bitcast_convert_type(packed[:, _KEY], jnp.uint32),
                ),
            ),
            page_table=packed[:, _FIXED + stop : _FIXED + stop + table],
            token_ids=packed[:, first : first + geometry.prefill_tile].astype(token_dtype()),
            allowed=allowed,
        )


def empty_decode_batch(size: int, geometry: Geometry) -> np.ndarray:
    """The packed array of a decode step of padding rows alone, i32[B, 1 + M]; a new one each time.

    size: B.
    """
    return np.zeros((size, 1 + geometry.pages_per_slot), np.int32)


def empty_prefill_batch(num_tiles: int, geometry: Geometry) -> np.ndarray:
    """A packed prefill array of padding tiles: i32[num_tiles, W]."""
    width = _FIXED + geometry.max_stop_ids + geometry.pages_per_slot + geometry.prefill_tile
    packed = np.zeros((num_tiles, width), np.int32)
    packed[:, _VALID] = 1  # a padding tile holds one token, written to the null page
    packed[:, _FIXED : _FIXED + geometry.max_stop_ids] = geometry.vocab_size
    return packed


def pack_prefill_tile(
    out: np.ndarray,
    geometry: Geometry,
    *,
    row: int,
    start: int,
    is_first: bool,
    tokens: np.ndarray,
    next_id: int | None,
    limits_row: np.ndarray,
    page_row: np.ndarray,
) -> None:
    """Fills one row of a packed prefill array in place.

    is_first: nothing of the prompt was dispatched before; what is in front came from the cache.
    next_id: the prompt's token after the tile, None where the prompt ends in it.
    limits_row: from `pack_limits`. page_row: i32[M] of the slot.
    """
    stop, table = geometry.max_stop_ids, geometry.pages_per_slot
    out[_ROW], out[_LEN], out[_VALID] = row, start, len(tokens)
    out[_FLAGS] = _FIRST * is_first + _FINAL * (next_id is None)
    out[_NEXT] = next_id or 0
    out[_MAX_LEN : _FIXED + stop] = limits_row
    out[_FIXED + stop : _FIXED + stop + table] = page_row
    out[_FIXED + stop + table :][: len(tokens)] = tokens


def pack_limits(
    geometry: Geometry,
    *,
    max_len: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: np.ndarray,
    stop_ids: list[int],
) -> np.ndarray:
    """Packs a request's limits as the columns of a prefill row: i32[7 + E]; key: u32[2]."""
    floats = np.array([temperature, top_p, min_p], np.float32).view(np.int32)
    out = np.full(_FIXED - _MAX_LEN + geometry.max_stop_ids, geometry.vocab_size, np.int32)
    fixed = [max_len, floats[0], top_k, floats[1], floats[2], *key.view(np.int32)]
    out[: len(fixed)] = fixed
    out[_FIXED - _MAX_LEN :][: len(stop_ids)] = stop_ids
    return out
