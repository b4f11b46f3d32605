"""Anchors, labels and weights, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.anchors import Anchors, labels_of, sample_anchors, slot_decay
from jaxspec.training.rows import pack_rows
from tests.training.tiny import conversation, device_rows

# One row: a prompt of 2 and a response of 5, a prompt of 1 and a response of 2, one of padding.
ROWS = pack_rows([conversation([10, 11, 12, 13, 14, 15, 16], 2)], 11, seed=0)
ROWS.token_ids[0, 7:10] = [20, 21, 22]
ROWS.segments[0, 7:10] = 2
ROWS.positions[0, 7:10] = [0, 1, 2]
ROWS.supervised[0, 8:10] = True


def test_anchors_are_own_tokens_followed_by_own_tokens():
    """2..5 of the first response and 8 of the second; not the last token of either."""
    anchors = sample_anchors(jax.random.key(0), device_rows(ROWS), 8)
    assert anchors.keep.tolist() == [[True] * 5 + [False] * 3]
    assert anchors.index[0, :5].tolist() == [2, 3, 4, 5, 8]


def test_anchors_are_distinct_uniform_and_redrawn():
    rows = device_rows(ROWS)
    draw = jax.jit(lambda seed: sample_anchors(jax.random.key(seed), rows, 2))
    draws = [draw(i) for i in range(300)]
    index = np.concatenate([draw.index for draw in draws])
    assert (index[:, 0] < index[:, 1]).all()
    counts = np.bincount(index.reshape(-1), minlength=11)
    assert set(np.nonzero(counts)[0]) == {2, 3, 4, 5, 8}
    np.testing.assert_allclose(counts[[2, 3, 4, 5, 8]] / 600, 0.2, atol=0.05)


def test_labels_stand_at_their_own_positions():
    """A label one further on (anchor + k + 1) or a left shift would show here (SpecForge 472)."""
    anchors = Anchors(jnp.asarray([[2, 5, 8]], jnp.int32), jnp.ones((1, 3), bool))
    labels = labels_of(device_rows(ROWS), anchors, 4)
    assert labels.token_ids[0, 0].tolist() == [13, 14, 15]
    assert labels.valid.tolist() == [
        [[True, True, True], [True, False, False], [True, False, False]]
    ]
    assert labels.token_ids[0, 1, 0] == 16
    assert labels.token_ids[0, 2, 0] == 22
    assert labels.source[0].tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 10]]


def test_dropped_blocks_have_no_labels():
    anchors = Anchors(jnp.asarray([[2, 3]], jnp.int32), jnp.asarray([[True, False]]))
    labels = labels_of(device_rows(ROWS), anchors, 3)
    assert labels.valid.tolist() == [[[True, True], [False, False]]]


@pytest.mark.parametrize(
    ("block", "gamma", "third"),
    [(8, None, 0.6065307), (16, None, 0.7514773), (10, None, 0.67032), (4, 1.0, 0.1353353)],
)
def test_decay_takes_the_papers_gamma_for_the_block_size(block, gamma, third):
    """gamma 4, 7 and 5 for blocks of 8, 16 and 10; slot 3 has exp(-2 / gamma)."""
    decay = slot_decay(block, gamma)
    assert decay.shape == (block - 1,)
    assert decay[0] == 1.0
    np.testing.assert_allclose(decay[2], third, rtol=1e-6)
