"""Packing and the order of rows, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.training.rows import batch_indices, pack_rows
from tests.training.tiny import conversation


def test_rows_hold_whole_conversations_with_positions_of_their_own():
    rows = pack_rows([conversation([7, 8, 9], 1), conversation([4, 5, 6, 3], 2)], 8, seed=0)
    assert len(rows) == 1
    order = rows.token_ids[0].tolist()
    assert order in ([7, 8, 9, 4, 5, 6, 3, 0], [4, 5, 6, 3, 7, 8, 9, 0])
    first = 3 if order[0] == 7 else 4
    assert rows.segments[0].tolist() == [1] * first + [2] * (7 - first) + [0]
    assert rows.positions[0].tolist() == [*range(first), *range(7 - first), 0]
    supervised = [False, True, True], [False, False, True, True]
    one, two = supervised if first == 3 else supervised[::-1]
    assert rows.supervised[0].tolist() == [*one, *two, False]


def test_nothing_is_lost_or_doubled_and_rows_are_nearly_full():
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 60, 400)
    rows = pack_rows([conversation([i + 1] * n, 1) for i, n in enumerate(sizes)], 100, seed=3)
    counts = np.bincount(rows.token_ids.reshape(-1), minlength=401)[1:]
    np.testing.assert_array_equal(counts, sizes)
    assert (rows.segments > 0).mean() > 0.95


def test_a_long_conversation_loses_its_end_and_a_short_answer_is_left_out():
    rows = pack_rows(
        [
            conversation(list(range(1, 20)), 2),
            conversation([30, 31, 32, 33, 34, 35, 36, 37, 38], 8),
            conversation([50, 51, 52], 2),
        ],
        8,
        seed=0,
    )
    assert rows.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_data_without_two_tokens_of_an_answer_in_reach_is_refused():
    with pytest.raises(ValueError, match=r"none of 1 conversations has two tokens.*within 4"):
        pack_rows([conversation([1, 2, 3, 4, 5, 6], 4)], 4, seed=0)


def test_steps_go_through_every_row_once_an_epoch_in_new_orders():
    """7 rows in steps of 3: epochs end inside steps; any step can be asked for by itself."""
    order = np.concatenate([batch_indices(step, 3, 7, seed=5) for step in range(7)])
    for epoch in range(3):
        assert sorted(order[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert order[:7].tolist() != order[7:14].tolist()
    np.testing.assert_array_equal(batch_indices(4, 3, 7, seed=5), order[12:15])
    assert not np.array_equal(batch_indices(0, 7, 7, seed=6), order[:7])
