"""`accept` as one Pallas-Triton launch; `accept_tree` shares its second half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.accept.reference import PACKED_EXTRA, Accepted


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def accept(block_ids, predicted, lens, max_lens, stop_ids, frozen, *, interpret) -> Accepted:
    """See `accept`. Grid: (B,); a lane holds one column of the packed output."""
    batch, block_size = block_ids.shape
    return Accepted(
        *pl.pallas_call(
            _kernel,
            name="accept",
            grid=(batch,),
            out_shape=tuple(accepted_shapes(batch, block_size, block_ids.dtype)),
            compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
        )(block_ids, predicted, lens, max_lens, stop_ids, frozen)
    )


def accepted_shapes(batch: int, block_size: int, token_dtype: Any) -> Accepted:
    """The shapes that `commit` fills."""
    i32_row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Accepted(
        tokens=jax.ShapeDtypeStruct((batch, block_size), token_dtype),
        num_accepted=i32_row,
        num_committed=i32_row,
        bonus=jax.ShapeDtypeStruct((batch,), token_dtype),
        new_lens=i32_row,
        finished=jax.ShapeDtypeStruct((batch,), jnp.bool_),
        packed=jax.ShapeDtypeStruct((batch, block_size + PACKED_EXTRA), jnp.int32),
    )


def lanes(block_size: int) -> jax.Array:
    """i32[power of two] column numbers, enough for the packed output."""
    return jnp.arange(pl.next_power_of_2(block_size + PACKED_EXTRA), dtype=jnp.int32)


def _kernel(
    block_ids_ref,  # [B, N]
    predicted_ref,  # [B, N]
    lens_ref,  # [B]
    max_lens_ref,  # [B]
    stop_ids_ref,  # [B, E]
    frozen_ref,  # [B]
    *accepted_refs,
):
    b = pl.program_id(0)
    block_size = block_ids_ref.shape[1]
    lane = lanes(block_size)
    in_block = lane < block_size
    predicted = pltriton.load(predicted_ref.at[b, lane], mask=in_block, other=0)
    predicted = predicted.astype(block_ids_ref.dtype)
    draft = pltriton.load(block_ids_ref.at[b, lane + 1], mask=lane < block_size - 1, other=0)
    # The first lane whose draft is wrong; the last position, without a draft, ends every row.
    num_accepted = jnp.min(jnp.where(predicted == draft, block_size - 1, lane))
    limits = (lens_ref, max_lens_ref, stop_ids_ref, frozen_ref)
    commit(b, predicted, num_accepted, block_ids_ref, limits, accepted_refs)


def commit(b, emitted, num_accepted, block_ids_ref, limit_refs, accepted_refs):
    """Clips row b's emitted tokens and writes all results, inside a kernel.

    Args:
      b: the row. emitted: its tokens, one a lane of `lanes`. num_accepted: scalar.
      block_ids_ref: token_dtype[B, N].
      limit_refs: refs of lens, max_lens, stop_ids, frozen.
      accepted_refs: refs of the fields of `Accepted`.
    """
    lens_ref, max_lens_ref, stop_ids_ref, frozen_ref = limit_refs
    out = Accepted(*accepted_refs)
    block_size, num_stop_ids = block_ids_ref.shape[1], stop_ids_ref.shape[1]
    lane = lanes(block_size)
    length = pltriton.load(lens_ref.at[b])
    max_length = pltriton.load(max_lens_ref.at[b])
    frozen = pltriton.load(frozen_ref.at[b])
    old_bonus = pltriton.load(block_ids_ref.at[b, jnp.int32(0)])

    stop_lane = jnp.arange(pl.next_power_of_2(num_stop_ids), dtype=jnp.int32)
    # Lanes past the end repeat the row's first stop id, which changes nothing.
    stop_lane = jnp.where(stop_lane < num_stop_ids, stop_lane, 0)
    stop_ids = pltriton.load(stop_ids_ref.at[b, stop_lane]).astype(emitted.dtype)
    is_stop = jnp.where(emitted[:, None] == stop_ids[None, :], lane[:, None], block_size)
    first_stop = jnp.min(is_stop)

    room = jnp.maximum(max_length - (length + 1), 0)
    committed = jnp.minimum(jnp.minimum(num_accepted, first_stop) + 1, room)
    committed = jnp.where(frozen, 0, committed)
    num_accepted = jnp.where(frozen, 0, num_accepted)
    finished = frozen | (first_stop < committed) | (length + 1 + committed >= max_length)
    tokens = jnp.where(lane < committed, emitted, 0)
    last_token = jnp.sum(jnp.where(lane == committed - 1, emitted, 0), dtype=emitted.dtype)

    pltriton.store(out.tokens.at[b, lane], tokens, mask=lane < block_size)
    pltriton.store(out.num_accepted.at[b], num_accepted)
    pltriton.store(out.num_committed.at[b], committed)
    pltriton.store(out.bonus.at[b], jnp.where(committed > 0, last_token, old_bonus))
    pltriton.store(out.new_lens.at[b], length + committed)
    pltriton.store(out.finished.at[b], finished)
    packed = tokens.astype(jnp.int32)
    packed = jnp.where(lane == block_size, committed, packed)
    packed = jnp.where(lane == block_size + 1, num_accepted, packed)
    packed = jnp.where(lane == block_size + 2, finished.astype(jnp.int32), packed)
    pltriton.store(out.packed.at[b, lane], packed, mask=lane < block_size + PACKED_EXTRA)
