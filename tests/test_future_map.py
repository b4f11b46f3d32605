"""Every verb of the relay, with 64-bit types off and on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.future_map import (
    ERROR_MEANINGS,
    NON_FINITE_LOGITS,
    STALE_READ,
    FutureMap,
    RelayPayload,
    describe_errors,
    resolve_seq_lens_cpu,
    token_dtype,
)
from kernels_pallas.resolve_future import LEN_NOT_POSITIVE, TOKEN_OUT_OF_RANGE

pytestmark = pytest.mark.usefixtures("x64")

SLOTS = 5
VOCAB = 32


def carry_of(value):
    """A carry pytree of two leaves: i32[S+1, 2] and a nested f32[S+1]."""
    size = SLOTS + 1
    return {
        "ids": jnp.full((size, 2), value, jnp.int32),
        "scores": (jnp.full((size,), value, jnp.float32),),
    }


def rows_of(*rows):
    return jnp.asarray(rows, jnp.int32)


def tokens_of(*tokens):
    return jnp.asarray(tokens, token_dtype())


def filled():
    """A relay whose row r holds token 10 + r, length 20 + r, carry 30 + r."""
    rows = jnp.arange(1, SLOTS + 1, dtype=jnp.int32)
    carry = {
        "ids": jnp.stack([rows, rows], axis=1) + 30,
        "scores": ((rows + 30).astype(jnp.float32),),
    }
    payload = RelayPayload((rows + 10).astype(token_dtype()), carry)
    return FutureMap.create(SLOTS, carry_of(0)).publish(rows, rows + 20).stash(rows, payload)


def check_shapes(relay):
    size = SLOTS + 1
    chex.assert_shape([relay.output_tokens, relay.seq_lens, relay.errors], (size,))
    chex.assert_type(relay.output_tokens, token_dtype())
    chex.assert_type([relay.seq_lens, relay.errors], jnp.int32)
    chex.assert_shape(relay.carry["ids"], (size, 2))
    chex.assert_type(relay.carry["ids"], jnp.int32)
    chex.assert_shape(relay.carry["scores"][0], (size,))
    chex.assert_type(relay.carry["scores"][0], jnp.float32)


def row(relay, index):
    """All that a row of the relay holds."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[index]), relay)


def test_tokens_are_64_bit_exactly_where_x64_is_on(x64):
    assert token_dtype() == (jnp.int64 if x64 else jnp.int32)
    assert FutureMap.create(2).output_tokens.dtype == token_dtype()


def test_a_new_map_holds_padding_in_every_row():
    relay = FutureMap.create(SLOTS, carry_of(7))
    check_shapes(relay)
    assert relay.output_tokens.tolist() == [0] * 6
    assert relay.seq_lens.tolist() == [1] * 6
    assert relay.errors.tolist() == [0] * 6
    chex.assert_trees_all_equal(relay.carry, carry_of(7))


def test_a_carry_leaf_without_a_row_a_slot_is_refused():
    wrong = {"ids": jnp.zeros((SLOTS, 2), jnp.int32)}
    with pytest.raises(ValueError, match=r"shape \(5, 2\); its first axis must be 6"):
        FutureMap.create(SLOTS, wrong)


def test_publish_writes_lengths_and_nothing_else():
    before = filled()
    after = before.publish(rows_of(2, 4), rows_of(77, 88))
    check_shapes(after)
    assert after.seq_lens.tolist() == [1, 21, 77, 23, 88, 25]
    chex.assert_trees_all_equal(after.replace(seq_lens=before.seq_lens), before)


def test_stash_writes_tokens_and_carry_and_nothing_else():
    before = filled()
    carry = {
        "ids": jnp.asarray([[1, 2], [3, 4]], jnp.int32),
        "scores": (jnp.asarray([5.0, 6.0], jnp.float32),),
    }
    after = before.stash(rows_of(5, 1), RelayPayload(tokens_of(3, 4), carry))
    check_shapes(after)
    assert after.output_tokens.tolist() == [0, 4, 12, 13, 14, 3]
    assert after.carry["ids"].tolist() == [[0, 0], [3, 4], [32, 32], [33, 33], [34, 34], [1, 2]]
    assert after.carry["scores"][0].tolist() == [0.0, 6.0, 32.0, 33.0, 34.0, 5.0]
    chex.assert_trees_all_equal([after.seq_lens, after.errors], [before.seq_lens, before.errors])


def test_stash_takes_tokens_of_the_narrower_dtype():
    after = filled().stash(rows_of(1), RelayPayload(rows_of(9), carry_row(0)))
    check_shapes(after)
    assert int(after.output_tokens[1]) == 9


def carry_row(value):
    return jax.tree.map(lambda leaf: leaf[:1], carry_of(value))


def carry_rows(value, count):
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], count, axis=0), carry_of(value))


@pytest.mark.parametrize("poison", [False, True])
def test_rows_outside_the_batch_keep_every_bit(poison):
    before = filled()
    rows = rows_of(3, 0, 1, 0)
    relay, _ = before.resolve_future(rows, vocab_size=VOCAB, poison=poison)
    relay = relay.publish(rows, rows_of(90, 91, 92, 93))
    payload = RelayPayload(tokens_of(1, 2, 3, 4), carry_rows(-1, 4))
    relay = relay.stash(rows, payload).flag(rows, rows_of(8, 8, 8, 8))
    for other in (2, 4, 5):
        chex.assert_trees_all_equal(row(relay, other), row(before, other))


@pytest.mark.parametrize("poison", [False, True])
def test_the_padding_row_stays_as_created_whatever_is_written_to_it(poison):
    rows = rows_of(0, 2, 0, 0)
    relay = filled()
    for _ in range(3):
        relay, resolved = relay.resolve_future(rows, vocab_size=VOCAB, poison=poison)
        assert resolved.tokens.tolist()[0] == 0
        assert resolved.lens.tolist()[0] == 1
        assert resolved.errors.tolist() == [0, 0, 0, 0]
        relay = relay.publish(rows, resolved.lens + 5)
        payload = RelayPayload(tokens_of(31, 6, 30, 29), carry_rows(3, 4))
        relay = relay.stash(rows, payload).flag(rows, rows_of(15, 0, 15, 15))
    relay = relay.release(rows_of(0, 0))
    assert (int(relay.output_tokens[0]), int(relay.seq_lens[0]), int(relay.errors[0])) == (0, 1, 0)
    assert (int(relay.output_tokens[2]), int(relay.seq_lens[2])) == (6, 37)


def test_resolve_returns_the_rows_in_the_order_of_the_batch():
    relay, resolved = filled().resolve_future(rows_of(4, 0, 2), vocab_size=VOCAB)
    check_shapes(relay)
    chex.assert_trees_all_equal(relay, filled())
    chex.assert_type(resolved.tokens, token_dtype())
    chex.assert_type([resolved.lens, resolved.errors], jnp.int32)
    assert resolved.tokens.tolist() == [14, 0, 12]
    assert resolved.lens.tolist() == [24, 1, 22]
    assert resolved.carry["ids"].tolist() == [[34, 34], [0, 0], [32, 32]]
    assert resolved.carry["scores"][0].tolist() == [34.0, 0.0, 32.0]
    assert resolved.errors.tolist() == [0, 0, 0]


def test_a_length_that_is_not_positive_flags_its_row():
    relay = filled().publish(rows_of(1, 2), rows_of(0, -3))
    relay, resolved = relay.resolve_future(rows_of(1, 2, 3), vocab_size=VOCAB)
    assert resolved.errors.tolist() == [LEN_NOT_POSITIVE, LEN_NOT_POSITIVE, 0]
    assert relay.errors.tolist() == [0, LEN_NOT_POSITIVE, LEN_NOT_POSITIVE, 0, 0, 0]
    assert resolved.lens.tolist() == [1, 1, 23]


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_outside_the_vocabulary_flags_its_row(token):
    """F6: a -1 that stands for "not known yet" must not read the last row of the embedding."""
    relay = filled().stash(rows_of(5), RelayPayload(tokens_of(token), carry_row(0)))
    relay, resolved = relay.resolve_future(rows_of(5, 4), vocab_size=VOCAB)
    assert resolved.errors.tolist() == [TOKEN_OUT_OF_RANGE, 0]
    assert relay.errors.tolist() == [0, 0, 0, 0, 0, TOKEN_OUT_OF_RANGE]
    assert 0 <= int(resolved.tokens[0]) < VOCAB


def test_a_second_read_without_a_stash_is_stale():
    rows = rows_of(2, 0, 5)
    relay, first = filled().resolve_future(rows, vocab_size=VOCAB, poison=True)
    assert first.errors.tolist() == [0, 0, 0]
    assert first.tokens.tolist() == [12, 0, 15]
    relay, second = relay.resolve_future(rows_of(5, 0, 4), vocab_size=VOCAB, poison=True)
    assert second.errors.tolist() == [STALE_READ, 0, 0]
    assert relay.errors.tolist() == [0, 0, 0, 0, 0, STALE_READ]


def test_publish_alone_does_not_clear_poison():
    relay, _ = filled().resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    relay = relay.publish(rows_of(2), rows_of(25))
    _, resolved = relay.resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    assert resolved.errors.tolist() == [TOKEN_OUT_OF_RANGE]


def test_stash_alone_does_not_clear_poison():
    relay, _ = filled().resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    relay = relay.stash(rows_of(2), RelayPayload(tokens_of(1), carry_row(0)))
    _, resolved = relay.resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    assert resolved.errors.tolist() == [LEN_NOT_POSITIVE]


def test_publish_and_stash_clear_poison():
    relay, _ = filled().resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    relay = relay.publish(rows_of(2), rows_of(25))
    relay = relay.stash(rows_of(2), RelayPayload(tokens_of(1), carry_row(0)))
    _, resolved = relay.resolve_future(rows_of(2), vocab_size=VOCAB, poison=True)
    assert resolved.errors.tolist() == [0]
    assert (resolved.tokens.tolist(), resolved.lens.tolist()) == ([1], [25])


def test_errors_stay_until_the_row_is_released():
    relay = filled().flag(rows_of(1, 3), rows_of(LEN_NOT_POSITIVE, NON_FINITE_LOGITS))
    relay = relay.flag(rows_of(1, 3), rows_of(TOKEN_OUT_OF_RANGE, 0))
    assert relay.errors.tolist() == [0, 3, 0, NON_FINITE_LOGITS, 0, 0]
    relay = relay.release(rows_of(1))
    assert relay.errors.tolist() == [0, 0, 0, NON_FINITE_LOGITS, 0, 0]


def test_release_leaves_a_row_like_a_new_one():
    relay = filled().flag(rows_of(2), rows_of(1)).release(rows_of(2, 0, 0))
    check_shapes(relay)
    assert (int(relay.output_tokens[2]), int(relay.seq_lens[2]), int(relay.errors[2])) == (0, 1, 0)
    chex.assert_trees_all_equal(row(relay, 1), row(filled(), 1))


def test_resolve_block_is_resolve_and_the_block_behind_it():
    page_table = jnp.asarray([[3, 4, 5, 6, 7, 8], [0] * 6, [9, 10, 11, 12, 13, 14]], jnp.int32)
    rows = rows_of(1, 0, 4)
    relay, resolved, block = filled().resolve_block(
        rows,
        page_table,
        vocab_size=VOCAB,
        mask_token_id=31,
        block_size=3,
        page_size=4,
        poison=True,
    )
    alone, alone_resolved = filled().resolve_future(rows, vocab_size=VOCAB, poison=True)
    chex.assert_trees_all_equal(relay.flag(rows, resolved.errors), alone)
    chex.assert_trees_all_equal(resolved, alone_resolved)
    chex.assert_type(block.block_ids, token_dtype())
    chex.assert_type([block.positions, block.kv_locs], jnp.int32)
    assert block.block_ids.tolist() == [[11, 31, 31], [0, 31, 31], [14, 31, 31]]
    assert block.positions.tolist() == [[21, 22, 23], [1, 2, 3], [24, 25, 26]]
    # Position 21 of row 1 is place 1 of its page 5, the table's entry 8; 24 of row 4 is past it.
    assert block.kv_locs.tolist() == [[33, 34, 35], [1, 2, 3], [0, 1, 2]]


def test_resolve_block_tells_of_a_stale_read_and_leaves_it_to_the_step_to_flag():
    static = dict(vocab_size=VOCAB, mask_token_id=0, block_size=2, page_size=4, poison=True)
    page_table = jnp.ones((1, 2), jnp.int32)
    relay, _, _ = filled().resolve_block(rows_of(3), page_table, **static)
    relay, resolved, _ = relay.resolve_block(rows_of(3), page_table, **static)
    assert resolved.errors.tolist() == [STALE_READ]
    assert int(relay.errors[3]) == 0


def test_all_verbs_compose_under_jit():
    def verbs(relay, rows):
        relay, resolved = relay.resolve_future(rows, vocab_size=VOCAB, poison=True)
        relay = relay.publish(rows, resolved.lens + 2)
        return relay.stash(rows, RelayPayload(resolved.tokens + 1, resolved.carry))

    relay = jax.jit(verbs, donate_argnums=0)(filled(), rows_of(2, 0))
    check_shapes(relay)
    assert relay.output_tokens.tolist() == [0, 11, 13, 13, 14, 15]
    assert relay.seq_lens.tolist() == [1, 21, 24, 23, 24, 25]


def test_describe_errors_names_the_slot_the_bits_and_their_meaning():
    text = describe_errors(4, STALE_READ | NON_FINITE_LOGITS)
    assert text == (
        "slot 4 has error bits 12: it was resolved twice without a stash between; the model's "
        "logits were not finite: its weights are damaged, or overflow in float16 (then use dtype "
        "float32)"
    )
    assert sorted(ERROR_MEANINGS) == [1, 2, 4, 8]


def test_with_nothing_in_flight_the_bound_is_the_length():
    published = np.array([0, 5, 9, 12], np.int32)
    lens, bounds = resolve_seq_lens_cpu(published, np.zeros(4, np.int32), np.array([3, 1]))
    assert lens.tolist() == [12, 5]
    assert bounds.tolist() == [12, 5]


def test_what_is_in_flight_raises_the_bound_only():
    published = np.array([0, 5, 9, 12], np.int32)
    in_flight = np.array([0, 16, 0, 8], np.int32)
    lens, bounds = resolve_seq_lens_cpu(published, in_flight, np.array([1, 2, 3]))
    assert lens.tolist() == [5, 9, 12]
    assert bounds.tolist() == [21, 9, 20]


def test_the_host_bounds_lengths_without_a_device_array():
    """It cannot block: numpy in, numpy out, and no copy from the device is possible meanwhile."""
    published, in_flight = np.array([0, 5], np.int32), np.array([0, 8], np.int32)
    with jax.transfer_guard("disallow"):
        result = resolve_seq_lens_cpu(published, in_flight, np.array([1]))
    assert type(result.lens) is np.ndarray
    assert type(result.upper_bounds) is np.ndarray
