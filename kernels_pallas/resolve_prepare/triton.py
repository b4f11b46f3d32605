"""`resolve_prepare` as one Pallas-Triton launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels_pallas import dispatch
from kernels_pallas.dflash_prepare_block.reference import PreparedBlock
from kernels_pallas.dflash_prepare_block.triton import block_shapes, write_block
from kernels_pallas.resolve_future.reference import ResolvedFuture
from kernels_pallas.resolve_future.triton import launch


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device`, or None: it takes every shape."""
    del shapes
    return dispatch.refuses_triton(device)


def resolve_prepare(
    output_tokens,
    seq_lens,
    carry,
    rows,
    page_table,
    *,
    vocab_size,
    mask_token_id,
    block_size,
    page_size,
    poison,
    interpret,
) -> tuple[ResolvedFuture, PreparedBlock]:
    """See `resolve_prepare`; `resolve_future.triton.launch` says what the grid is."""

    def prepare(b, token, length, page_table_ref, block_refs):
        write_block(
            b,
            token,
            length,
            page_table_ref,
            block_refs,
            mask_token_id=mask_token_id,
            page_size=page_size,
        )

    return launch(
        output_tokens,
        seq_lens,
        carry,
        rows,
        vocab_size=vocab_size,
        poison=poison,
        interpret=interpret,
        name="resolve_prepare",
        then=prepare,
        then_inputs=page_table,
        then_shapes=block_shapes(rows.shape[0], block_size, output_tokens.dtype),
    )
