"""The relay: what each request carries from one step to the next, on the device.

Step n+1 is dispatched before the host knows the result of step n; everything it needs of step n
lies in one immutable `FutureMap`, a row a request, for every drafting algorithm alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.dflash_prepare_block import PreparedBlock
from kernels_pallas.resolve_future import LEN_NOT_POSITIVE, TOKEN_OUT_OF_RANGE, ResolvedFuture
from kernels_pallas.resolve_future import resolve_future as resolve_future_op
from kernels_pallas.resolve_prepare import resolve_prepare as resolve_prepare_op

STALE_READ = 4  # the row was resolved before and nothing was stashed since (poison mode only)
NON_FINITE_LOGITS = 8

ERROR_MEANINGS = {
    LEN_NOT_POSITIVE: "its length was not positive when it was resolved",
    TOKEN_OUT_OF_RANGE: "its token was outside the vocabulary when it was resolved",
    STALE_READ: "it was resolved twice without a stash between",
    NON_FINITE_LOGITS: "the model's logits were not finite: its weights are damaged, or overflow "
    "in float16 (then use dtype float32)",
}
PADDING_TOKEN = 0
PADDING_LEN = 1


def token_dtype() -> jnp.dtype:
    """The one dtype of token ids: int64 where x64 is enabled, else int32."""
    return jax.dtypes.canonicalize_dtype(jnp.int64)


@flax.struct.dataclass
class RelayPayload:
    """What a step hands to the next one, besides the length.

    bonus_tokens: token_dtype[B] next token (plain decoding) or bonus token (any drafter).
    carry: the drafter's own leaves [B, ...]; () when it relays nothing.
    """

    bonus_tokens: jax.Array
    carry: Any = ()


@flax.struct.dataclass
class FutureMap:
    """Rows of requests; row 0 is the padding row, which no request owns.

    Every method is pure and returns a new map. Batches name rows by `rows: i32[B]`, in which
    only row 0 may stand more than once; whatever a batch publishes or stashes for row 0, the row
    keeps (token 0, length 1).

    output_tokens: token_dtype[S+1] the last token of each request, not yet in any KV.
    seq_lens: i32[S+1] rows of final target KV, which is the position of `output_tokens[row]`.
    carry: pytree, leaves [S+1, ...], the drafter's.
    errors: i32[S+1] sticky bits, see ERROR_MEANINGS.
    """

    output_tokens: jax.Array
    seq_lens: jax.Array
    carry: Any
    errors: jax.Array

    @classmethod
    def create(cls, num_slots: int, carry: Any = ()) -> FutureMap:
        """Builds the map of `num_slots` requests; `carry` leaves are [num_slots + 1, ...]."""
        for leaf in jax.tree.leaves(carry):
            if leaf.shape[:1] != (num_slots + 1,):
                raise ValueError(
                    f"a carry leaf has shape {leaf.shape}; its first axis must be "
                    f"{num_slots + 1}, one row a slot and the padding row"
                )
        size = num_slots + 1
        return cls(
            output_tokens=jnp.full((size,), PADDING_TOKEN, token_dtype()),
            seq_lens=jnp.full((size,), PADDING_LEN, jnp.int32),
            carry=carry,
            errors=jnp.zeros((size,), jnp.int32),
        )

    def publish(self, rows: jax.Array, new_seq_lens: jax.Array) -> FutureMap:
        """Writes the lengths i32[B], as soon as verification is done."""
        lens = jnp.where(rows == 0, jnp.int32(PADDING_LEN), new_seq_lens)
        return self.replace(seq_lens=self.seq_lens.at[rows].set(lens))

    def stash(self, rows: jax.Array, payload: RelayPayload) -> FutureMap:
        """Writes tokens and carry, once the drafter has ingested the committed tokens."""
        tokens = jnp.where(rows == 0, PADDING_TOKEN, payload.bonus_tokens)
        return self.replace(
            output_tokens=self.output_tokens.at[rows].set(tokens.astype(token_dtype())),
            carry=jax.tree.map(lambda a, b: a.at[rows].set(b), self.carry, payload.carry),
        )

    def flag(self, rows: jax.Array, bits: jax.Array) -> FutureMap:
        """ORs error bits i32[B] into the rows; row 0 never errs."""
        bits = jnp.where(rows == 0, 0, self.errors[rows] | bits)
        return self.replace(errors=self.errors.at[rows].set(bits))

    def release(self, rows: jax.Array) -> FutureMap:
        """Clears the rows for their next owner."""
        zeros = jnp.zeros_like(rows)
        return self.publish(rows, zeros + PADDING_LEN).replace(
            output_tokens=self.output_tokens.at[rows].set(zeros.astype(token_dtype())),
            errors=self.errors.at[rows].set(zeros),
        )

    def resolve_future(
        self,
        rows: jax.Array,
        *,
        vocab_size: int,
        poison: bool = False,
        implementation: str = "xla",
    ) -> tuple[FutureMap, ResolvedFuture]:
        """Reads tokens, lengths and carry of a batch's rows, and checks them.

        poison: marks the rows as read, so that a second read without a stash is caught.
        Returns the map (poisoned, errors flagged) and the batch's values, errors i32[B] included.
        """
        resolved = resolve_future_op(
            self.output_tokens,
            self.seq_lens,
            self.carry,
            rows,
            vocab_size=vocab_size,
            poison=poison,
            implementation=implementation,
        )
        relay, resolved = self._resolved(resolved, poison)
        return relay.flag(rows, resolved.errors), resolved

    def resolve_block(
        self,
        rows: jax.Array,
        page_table: jax.Array,
        *,
        vocab_size: int,
        mask_token_id: int,
        block_size: int,
        page_size: int,
        poison: bool = False,
        implementation: str = "xla",
    ) -> tuple[FutureMap, ResolvedFuture, PreparedBlock]:
        """`resolve_future` and the preparation of the batch's blocks, in one launch.

        The errors are in the batch's values alone: a step flags them together with its own.
        """
        resolved, block = resolve_prepare_op(
            self.output_tokens,
            self.seq_lens,
            self.carry,
            rows,
            page_table,
            vocab_size=vocab_size,
            mask_token_id=mask_token_id,
            block_size=block_size,
            page_size=page_size,
            poison=poison,
            implementation=implementation,
        )
        return *self._resolved(resolved, poison), block

    def _resolved(self, resolved: ResolvedFuture, poison: bool) -> tuple[FutureMap, ResolvedFuture]:
        if poison:
            # A poisoned row is out of range in both fields, which no live row can be by accident.
            both = LEN_NOT_POSITIVE | TOKEN_OUT_OF_RANGE
            stale = resolved.errors & both == both
            errors = jnp.where(stale, STALE_READ, resolved.errors).astype(jnp.int32)
            resolved = resolved._replace(errors=errors)
        relay = self.replace(output_tokens=resolved.output_tokens, seq_lens=resolved.seq_lens)
        return relay, resolved


class RelayError(RuntimeError):
    """The relay of a request was read or written out of turn: a fault of the engine.

    outputs: what the step has changed all the same, the faulty requests with their errors.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()):
        super().__init__(message)
        self.outputs = outputs


def describe_errors(slot: int, bits: int) -> str:
    """Says what the error bits of a slot mean."""
    meanings = [text for bit, text in ERROR_MEANINGS.items() if bits & bit]
    return f"slot {slot} has error bits {bits}: {'; '.join(meanings)}"


class SeqLensCpu(NamedTuple):
    """Lengths as the host knows them."""

    lens: np.ndarray  # i32[n] rows of KV after the last result that has landed
    upper_bounds: np.ndarray  # i32[n] rows of KV at most, once all that is in flight has landed


def resolve_seq_lens_cpu(
    published_lens: np.ndarray, in_flight_rows: np.ndarray, rows: np.ndarray
) -> SeqLensCpu:
    """Bounds the lengths of `rows` without waiting for the device.

    published_lens: i32[S+1] the host's mirror of the lengths of the last landed results.
    in_flight_rows: i32[S+1] KV rows that the dispatches in flight can add to a request at most,
    up to two blocks (times the steps of a loop). With nothing in flight the bound is the length
    itself; which algorithm drafts does not matter.
    """
    lens = published_lens[rows]
    return SeqLensCpu(lens, lens + in_flight_rows[rows])
