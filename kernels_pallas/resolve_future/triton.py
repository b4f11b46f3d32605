"""`resolve_future` as one Pallas-Triton launch; `resolve_prepare` gives it a second half."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch
from kernels_pallas.resolve_future.reference import (
    LEN_NOT_POSITIVE,
    TOKEN_OUT_OF_RANGE,
    ResolvedFuture,
)

# Elements of a carry row that one program copies: at four warps, two 16-byte loads a thread of a
# 16-bit type.
CARRY_TILE = 2048


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def resolve_future(
    output_tokens, seq_lens, carry, rows, *, vocab_size, poison, interpret
) -> ResolvedFuture:
    """See `resolve_future`."""
    resolved, _ = launch(
        output_tokens,
        seq_lens,
        carry,
        rows,
        vocab_size=vocab_size,
        poison=poison,
        interpret=interpret,
        name="resolve_future",
    )
    return resolved


def launch(
    output_tokens,
    seq_lens,
    carry,
    rows,
    *,
    vocab_size: int,
    poison: bool,
    interpret: bool,
    name: str,
    then: Callable[..., None] | None = None,
    then_inputs: Any = (),
    then_shapes: Any = (),
) -> tuple[ResolvedFuture, Any]:
    """Reads the batch's rows and does something more with each, in one launch.

    Grid: (B, tiles of the longest carry row). Program (b, 0) reads row b of the relay and runs
    `then`; program (b, t) copies tile t of each leaf.

    Args:
      output_tokens, seq_lens, carry, rows, vocab_size, poison: as in `resolve_future`.
      interpret: run by JAX's interpreter.
      name: of the launch, for the profiler.
      then: called in the kernel as `then(b, token, length, input_refs, output_refs)`.
      then_inputs, then_shapes: pytrees of the arrays it reads and the shapes it writes.

    Returns:
      What `resolve_future` returns, and what `then` wrote.
    """
    batch = rows.shape[0]
    leaves, structure = jax.tree.flatten(carry)
    # A leaf without elements has nothing to copy, and no kernel takes it.
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves if leaf.size]
    widest = max((leaf.shape[1] for leaf in flat), default=1)
    tile = min(pl.next_power_of_2(widest), CARRY_TILE)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    relay = (output_tokens, seq_lens) if poison else ()
    tokens, lens, errors, carried, relay, then_results = pl.pallas_call(
        functools.partial(
            _kernel, vocab_size=vocab_size, tile=tile, then=then or (lambda *_: None)
        ),
        name=name,
        grid=(batch, pl.cdiv(widest, tile)),
        out_shape=(
            jax.ShapeDtypeStruct((batch,), output_tokens.dtype),
            i32((batch,)),
            i32((batch,)),
            [jax.ShapeDtypeStruct((batch, leaf.shape[1]), leaf.dtype) for leaf in flat],
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in relay),
            then_shapes,
        ),
        input_output_aliases={0: 3 + len(flat), 1: 4 + len(flat)} if poison else {},
        compiler_params=pltriton.CompilerParams(num_warps=1 if tile <= 256 else 4, num_stages=1),
        interpret=interpret,
    )(output_tokens, seq_lens, rows, flat, then_inputs)
    copies = iter(carried)
    shapes = [((batch, *leaf.shape[1:]), leaf) for leaf in leaves]
    carried = [
        next(copies).reshape(shape) if leaf.size else jnp.zeros(shape, leaf.dtype)
        for shape, leaf in shapes
    ]
    resolved = ResolvedFuture(
        tokens=tokens,
        lens=lens,
        carry=jax.tree.unflatten(structure, carried),
        errors=errors,
        output_tokens=relay[0] if poison else output_tokens,
        seq_lens=relay[1] if poison else seq_lens,
    )
    return resolved, then_results


def _kernel(
    output_tokens_ref,  # [S+1]
    seq_lens_ref,  # [S+1]
    rows_ref,  # [B]
    leaf_refs,  # [S+1, F] each
    then_input_refs,
    tokens_ref,  # [B]
    lens_ref,  # [B]
    errors_ref,  # [B]
    carry_refs,  # [B, F] each
    relay_refs,  # the first two again, to be poisoned, or nothing
    then_output_refs,
    *,
    vocab_size,
    tile,
    then,
):
    b, t = pl.program_id(0), pl.program_id(1)
    row = pltriton.load(rows_ref.at[b])
    row = jnp.where((row >= 0) & (row < seq_lens_ref.shape[0]), row, 0)

    @pl.when(t == 0)
    def _read():
        token = pltriton.load(output_tokens_ref.at[row])
        length = pltriton.load(seq_lens_ref.at[row])
        bad_token = (token < 0) | (token >= vocab_size)
        errors = jnp.where(length <= 0, jnp.int32(LEN_NOT_POSITIVE), 0)
        errors |= jnp.where(bad_token, jnp.int32(TOKEN_OUT_OF_RANGE), 0)
        safe_token = jnp.clip(token, 0, vocab_size - 1)
        safe_length = jnp.maximum(length, 1)
        pltriton.store(tokens_ref.at[b], safe_token)
        pltriton.store(lens_ref.at[b], safe_length)
        pltriton.store(errors_ref.at[b], jnp.where(row == 0, 0, errors))
        if relay_refs:
            # Padding rows, all row 0, write back what they read, whoever comes first.
            poison_token = jnp.asarray(vocab_size, token.dtype)
            pltriton.store(relay_refs[0].at[row], jnp.where(row == 0, token, poison_token))
            pltriton.store(relay_refs[1].at[row], jnp.where(row == 0, length, 0))
        then(b, safe_token, safe_length, then_input_refs, then_output_refs)

    column = t * tile + jnp.arange(tile, dtype=jnp.int32)
    for leaf_ref, carry_ref in zip(leaf_refs, carry_refs, strict=True):
        # Lanes past a leaf's end hold nothing and write nothing.
        inside = column < leaf_ref.shape[1]
        pltriton.store(
            carry_ref.at[b, column],
            pltriton.load(leaf_ref.at[row, column], mask=inside),
            mask=inside,
        )
