"""What `resolve_prepare` means: the two references one after the other."""

from __future__ import annotations

from kernels_pallas.dflash_prepare_block.reference import PreparedBlock, dflash_prepare_block
from kernels_pallas.resolve_future.reference import ResolvedFuture, resolve_future


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
    poison=False,
) -> tuple[ResolvedFuture, PreparedBlock]:
    resolved = resolve_future(
        output_tokens, seq_lens, carry, rows, vocab_size=vocab_size, poison=poison
    )
    prepared = dflash_prepare_block(
        resolved.tokens,
        resolved.lens,
        page_table,
        mask_token_id=mask_token_id,
        block_size=block_size,
        page_size=page_size,
    )
    return resolved, prepared
