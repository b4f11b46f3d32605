"""The accept rule and its clipping, on blocks small enough to write down."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from jaxspec.drafters.base import DraftBlock
from jaxspec.future_map import token_dtype
from jaxspec.verify import Bounds, verify

VOCAB = 50
NO_STOP = (VOCAB, VOCAB)


def verify_row(
    drafts,
    predicted,
    *,
    bonus=9,
    meant=None,
    seq_len=10,
    max_len=100,
    stop=NO_STOP,
    frozen=False,
    force_accept=None,
):
    """Verifies one block beside a frozen padding row, and returns the block's results."""
    block = len(drafts) + 1
    meant = len(drafts) if meant is None else meant
    accepted, path = verify(
        DraftBlock(
            jnp.asarray([[0] * block, [bonus, *drafts]], token_dtype()),
            jnp.asarray([0, meant], jnp.int32),
        ),
        jnp.asarray([[7] * block, predicted], token_dtype()),
        jnp.asarray([1, seq_len], jnp.int32),
        Bounds(
            jnp.asarray([0, max_len], jnp.int32),
            jnp.asarray([NO_STOP, stop], jnp.int32),
            jnp.asarray([True, frozen]),
        ),
        vocab_size=VOCAB,
        kernels=Kernels(),
        force_accept=force_accept,
    )
    assert path is None, "a chain has none"
    check_shapes(accepted, 2, block)
    padding = [leaf[0].tolist() for leaf in accepted]
    assert padding == [[0] * block, 0, 0, 0, 1, True, [0] * block + [0, 0, 1, 0]]
    return {
        "tokens": accepted.tokens[1, : int(accepted.num_committed[1])].tolist(),
        "num_accepted": int(accepted.num_accepted[1]),
        "bonus": int(accepted.bonus[1]),
        "new_len": int(accepted.new_lens[1]),
        "finished": bool(accepted.finished[1]),
    }


def check_shapes(accepted, rows, block):
    chex.assert_shape(accepted.tokens, (rows, block))
    chex.assert_shape(accepted.packed, (rows, block + 4))
    chex.assert_shape(
        [accepted.num_accepted, accepted.num_committed, accepted.bonus, accepted.new_lens], (rows,)
    )
    chex.assert_shape(accepted.finished, (rows,))
    chex.assert_type([accepted.tokens, accepted.bonus], token_dtype())
    chex.assert_type(
        [accepted.num_accepted, accepted.num_committed, accepted.new_lens, accepted.packed],
        jnp.int32,
    )
    chex.assert_type(accepted.finished, bool)
    packed = np.asarray(accepted.packed)
    assert packed[:, :block].tolist() == accepted.tokens.tolist()
    assert packed[:, block].tolist() == accepted.num_committed.tolist()
    assert packed[:, block + 1].tolist() == accepted.num_accepted.tolist()
    assert packed[:, block + 2].tolist() == accepted.finished.astype(int).tolist()
    assert packed[:, block + 3].tolist() == [0] * rows


@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [
        ([1, 2, 3], [1, 2, 3, 4]),
        ([1, 2, 9], [1, 2, 3]),
        ([1, 9, 3], [1, 2]),
        ([9, 2, 3], [1]),
        ([9, 9, 9], [1]),
    ],
)
def test_leading_right_drafts_and_one_more_are_committed(drafts, tokens, x64):
    result = verify_row(drafts, [1, 2, 3, 4])
    assert result == {
        "tokens": tokens,
        "num_accepted": len(tokens) - 1,
        "bonus": tokens[-1],
        "new_len": 10 + len(tokens),
        "finished": False,
    }


def test_what_is_emitted_never_depends_on_the_drafts():
    for drafts in ([1, 2, 3], [0, 0, 0], [1, 0, 3]):
        tokens = verify_row(drafts, [1, 2, 3, 4])["tokens"]
        assert tokens == [1, 2, 3, 4][: len(tokens)]


@pytest.mark.parametrize("offset", range(4))
def test_a_stop_id_at_any_offset_is_the_last_token(offset):
    """F1, the last offset being the bonus token."""
    predicted = [1, 2, 3, 4]
    result = verify_row(predicted[:3], predicted, stop=(VOCAB, predicted[offset]))
    assert result == {
        "tokens": predicted[: offset + 1],
        "num_accepted": 3,
        "bonus": predicted[offset],
        "new_len": 11 + offset,
        "finished": True,
    }


def test_a_stop_id_behind_the_accepted_drafts_does_not_count():
    result = verify_row([1, 9, 9], [1, 2, 3, 4], stop=(3, 4))
    assert (result["tokens"], result["finished"]) == ([1, 2], False)


@pytest.mark.parametrize("room", range(1, 5))
def test_a_limit_at_any_offset_ends_the_row(room):
    """The bonus token of length 10 is the 11th token; `room` more fit."""
    result = verify_row([1, 2, 3], [1, 2, 3, 4], max_len=11 + room)
    assert result == {
        "tokens": [1, 2, 3, 4][:room],
        "num_accepted": 3,
        "bonus": room,
        "new_len": 10 + room,
        "finished": True,
    }


def test_a_limit_behind_the_accepted_drafts_does_not_end_the_row():
    assert verify_row([1, 9, 9], [1, 2, 3, 4], max_len=14)["finished"] is False


def test_a_row_without_room_commits_nothing_and_is_finished():
    result = verify_row([1, 2, 3], [1, 2, 3, 4], max_len=11)
    assert result == {
        "tokens": [],
        "num_accepted": 3,
        "bonus": 9,
        "new_len": 10,
        "finished": True,
    }


@pytest.mark.parametrize(("room", "tokens"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3])], ids=str)
def test_of_stop_id_and_limit_the_earlier_ends_the_row(room, tokens):
    """F2: the stop id stands at offset 2."""
    result = verify_row([1, 2, 3], [1, 2, 3, 4], max_len=11 + room, stop=(3, VOCAB))
    assert (result["tokens"], result["finished"]) == (tokens, True)


def test_a_frozen_row_stays_as_it_is():
    result = verify_row([1, 2, 3], [1, 2, 3, 4], frozen=True, stop=(1, 2))
    assert result == {
        "tokens": [],
        "num_accepted": 0,
        "bonus": 9,
        "new_len": 10,
        "finished": True,
    }


@pytest.mark.parametrize("meant", range(4))
def test_drafts_that_are_not_meant_never_match(meant):
    result = verify_row([1, 2, 3], [1, 2, 3, 4], meant=meant)
    assert result["tokens"] == [1, 2, 3, 4][: meant + 1]
    assert result["num_accepted"] == meant


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("drafts", [[1, 2, 3], [9, 9, 9], [1, 9, 3], [VOCAB - 1, 0, 0]], ids=str)
def test_force_accept_takes_exactly_that_many_drafts(drafts, count):
    result = verify_row(drafts, [1, 2, 3, 4], force_accept=count, meant=1)
    assert result["num_accepted"] == count
    assert result["tokens"][:count] == drafts[:count]
    assert len(result["tokens"]) == count + 1
    assert 0 <= result["bonus"] < VOCAB


def test_force_accept_still_clips():
    result = verify_row([8, 8, 8], [1, 2, 3, 4], force_accept=3, max_len=13, stop=(5, VOCAB))
    assert (result["tokens"], result["finished"]) == ([8, 8], True)


# 0 -> 1 -> 3 -> 4 and 0 -> 2; the tokens of 1 and 2 differ.
PARENTS = [-1, 0, 0, 1, 3]


def verify_tree(predicted, *, meant=4, force_accept=None):
    """Tokens 11..14 behind bonus token 9, at position 10: (emitted tokens, path)."""
    accepted, path = verify(
        DraftBlock(
            jnp.asarray([[9, 11, 12, 13, 14]], token_dtype()),
            jnp.asarray([meant], jnp.int32),
            jnp.asarray([PARENTS], jnp.int32),
        ),
        jnp.asarray([predicted], token_dtype()),
        jnp.asarray([10], jnp.int32),
        Bounds(
            jnp.asarray([100], jnp.int32), jnp.asarray([NO_STOP], jnp.int32), jnp.asarray([False])
        ),
        vocab_size=VOCAB,
        kernels=Kernels(),
        force_accept=force_accept,
    )
    count = int(accepted.num_committed[0])
    return accepted.tokens[0, :count].tolist(), path[0, :count].tolist()


@pytest.mark.parametrize(
    ("predicted", "meant", "tokens", "path"),
    [
        ([11, 13, 40, 14, 41], 4, [11, 13, 14, 41], [0, 1, 3, 4]),
        ([12, 13, 40, 14, 41], 4, [12, 40], [0, 2]),
        ([30, 13, 40, 14, 41], 4, [30], [0]),
        ([11, 13, 40, 14, 41], 3, [11, 13, 14], [0, 1, 3]),
        ([12, 13, 40, 14, 41], 1, [12], [0]),
    ],
    ids=["deepest", "branch", "none", "the last draft is not meant", "nor the branch"],
)
def test_the_target_chooses_a_path_of_the_tree(predicted, meant, tokens, path):
    assert verify_tree(predicted, meant=meant) == (tokens, path)


@pytest.mark.parametrize(
    ("force_accept", "tokens", "path"),
    [(0, [30], [0]), (1, [11, 31], [0, 1]), (3, [11, 13, 14, 34], [0, 1, 3, 4])],
)
def test_forcing_follows_the_first_path_of_that_length(force_accept, tokens, path):
    predicted = [30, 31, 32, 33, 34]
    assert verify_tree(predicted, force_accept=force_accept) == (tokens, path)


def test_forcing_ends_a_path_whose_next_draft_is_right():
    assert verify_tree([11, 13, 40, 14, 41], force_accept=1) == ([11, 13], [0, 1])
