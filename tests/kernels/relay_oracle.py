"""`resolve_future` and `dflash_prepare_block` again, row by row in numpy."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import testing


def resolved(output_tokens, seq_lens, carry, rows, vocab_size, poison):
    """The fields of `ResolvedFuture`, carry as a list of leaves."""
    output_tokens, seq_lens = np.array(output_tokens), np.array(seq_lens)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
    tokens, lens, errors, carried = [], [], [], []
    old_tokens, old_lens = output_tokens.copy(), seq_lens.copy()
    for row in np.asarray(rows):
        token, length, bits = int(old_tokens[row]), int(old_lens[row]), 0
        if row != 0 and length < 1:
            bits += 1
        if row != 0 and not 0 <= token < vocab_size:
            bits += 2
        tokens.append(min(max(token, 0), vocab_size - 1))
        lens.append(max(length, 1))
        errors.append(bits)
        carried.append([leaf[row] for leaf in leaves])
        if poison and row != 0:
            output_tokens[row], seq_lens[row] = vocab_size, 0
    carried = [np.stack(column) for column in zip(*carried, strict=True)]
    return tokens, lens, carried, errors, output_tokens, seq_lens


def prepared(bonus, lens, page_table, mask_token_id, block_size, page_size):
    """block_ids, positions, kv_locs."""
    block_ids, positions, kv_locs = [], [], []
    for token, length, pages in zip(
        np.asarray(bonus), np.asarray(lens), np.asarray(page_table), strict=True
    ):
        block_ids.append([int(token)] + [mask_token_id] * (block_size - 1))
        positions.append([int(length) + i for i in range(block_size)])
        row = []
        for position in positions[-1]:
            page, offset = divmod(position, page_size)
            owned = 0 <= page < len(pages)
            row.append((int(pages[page]) if owned else 0) * page_size + offset)
        kv_locs.append(row)
    return block_ids, positions, kv_locs


def assert_resolved(result, expected):
    """Values, shapes and dtypes of a `ResolvedFuture`."""
    tokens, lens, leaves, errors, output_tokens, seq_lens = expected
    batch = len(tokens)
    chex.assert_shape([result.tokens, result.lens, result.errors], (batch,))
    chex.assert_equal_shape([result.output_tokens, result.seq_lens])
    chex.assert_type([result.tokens, result.output_tokens], testing.token_dtype())
    chex.assert_type([result.lens, result.errors, result.seq_lens], jnp.int32)
    np.testing.assert_array_equal(result.tokens, tokens)
    np.testing.assert_array_equal(result.lens, lens)
    np.testing.assert_array_equal(result.errors, errors)
    np.testing.assert_array_equal(result.output_tokens, output_tokens)
    np.testing.assert_array_equal(result.seq_lens, seq_lens)
    for actual, leaf in zip(jax.tree.leaves(result.carry), leaves, strict=True):
        chex.assert_shape(actual, leaf.shape)
        chex.assert_type(actual, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(actual), leaf)


def assert_prepared(result, expected):
    """Values, shapes and dtypes of a `PreparedBlock`."""
    block_ids, positions, kv_locs = expected
    chex.assert_shape(list(result), np.shape(block_ids))
    chex.assert_type(result.block_ids, testing.token_dtype())
    chex.assert_type([result.positions, result.kv_locs], jnp.int32)
    np.testing.assert_array_equal(result.block_ids, block_ids)
    np.testing.assert_array_equal(result.positions, positions)
    np.testing.assert_array_equal(result.kv_locs, kv_locs)
