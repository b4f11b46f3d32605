"""`accept` and `accept_tree` again, token by token in Python."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np

from kernels_pallas import testing


def walk_tree(block_ids, parents, predicted):
    """Emitted tokens of one row and the nodes that predicted them."""
    path, tokens, node = [], [], 0
    while node is not None:
        path.append(node)
        tokens.append(int(predicted[node]))
        children = [
            child
            for child in range(node + 1, len(block_ids))
            if parents[child] == node and block_ids[child] == tokens[-1]
        ]
        node = children[0] if children else None
    return tokens, path


def walk_chain(block_ids, predicted):
    """Emitted tokens of one row of a plain block."""
    tokens = [int(predicted[0])]
    while len(tokens) < len(block_ids) and int(block_ids[len(tokens)]) == tokens[-1]:
        tokens.append(int(predicted[len(tokens)]))
    return tokens


def committed(emitted, bonus, length, max_len, stop_ids, frozen, block_size):
    """The fields of `Accepted` of one row, the bonus token being counted already."""
    total = length + 1
    output, finished = [], bool(frozen) or total >= max_len
    for token in emitted:
        if finished:
            break
        output.append(token)
        finished = token in stop_ids or total + len(output) >= max_len
    accepted = 0 if frozen else len(emitted) - 1
    padded = output + [0] * (block_size - len(output))
    return (
        padded,
        accepted,
        len(output),
        output[-1] if output else int(bonus),
        int(length) + len(output),
        finished,
        [*padded, len(output), accepted, int(finished), 0],
    )


def expected(emitted_rows, block_ids, lens, max_lens, stop_ids, frozen):
    """The fields of `Accepted`, from each row's emitted tokens."""
    block_ids, lens, max_lens, stop_ids, frozen = map(
        np.asarray, (block_ids, lens, max_lens, stop_ids, frozen)
    )
    rows = [
        committed(
            emitted, block_ids[b, 0], lens[b], max_lens[b], set(stop_ids[b].tolist()),
            frozen[b], block_ids.shape[1],
        )
        for b, emitted in enumerate(emitted_rows)
    ]  # fmt: skip
    return [list(column) for column in zip(*rows, strict=True)]


def assert_accepted(result, fields):
    """Values, shapes and dtypes of an `Accepted`."""
    batch, block_size = np.shape(fields[0])
    chex.assert_shape(result.tokens, (batch, block_size))
    chex.assert_shape(result.packed, (batch, block_size + 4))
    chex.assert_shape(
        [result.num_accepted, result.num_committed, result.bonus, result.new_lens, result.finished],
        (batch,),
    )
    chex.assert_type([result.tokens, result.bonus], testing.token_dtype())
    chex.assert_type(
        [result.num_accepted, result.num_committed, result.new_lens, result.packed], jnp.int32
    )
    chex.assert_type(result.finished, bool)
    for name, actual, values in zip(result._fields, result, fields, strict=True):
        np.testing.assert_array_equal(actual, values, err_msg=name)
