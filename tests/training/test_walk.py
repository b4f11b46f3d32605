"""Serving in thought, by hand."""

from __future__ import annotations

import numpy as np

from jaxspec.training.rows import pack_rows
from jaxspec.training.walk import walk
from tests.training.tiny import conversation

# Answers at tokens 5..12 and, behind a prompt of one token, at 14..15.
ROWS = pack_rows([conversation([*range(13)], 5)], 20, seed=0)
ROWS.segments[0, 13:16] = 2
ROWS.supervised[0, 14:16] = True


def test_each_step_goes_on_where_the_last_ended():
    """3 at token 5, 1 at 8, 8 at 9 (4 of them past the end); then 1 at 14."""
    lengths = np.full((1, 20), 99.0)
    lengths[0, [5, 8, 9, 14]] = 3, 1, 8, 1
    assert walk(ROWS, lengths) == (7 + 1, 3 + 1)


def test_a_drafter_that_is_never_right_takes_a_step_a_token():
    assert walk(ROWS, np.ones((1, 20))) == (8, 8)
