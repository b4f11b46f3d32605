from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.resolve_future import (
    LEN_NOT_POSITIVE,
    TOKEN_OUT_OF_RANGE,
    cases,
    resolve_future,
)
from tests.kernels import relay_oracle

VOCAB = 10

jitted = jax.jit(resolve_future, static_argnames=("vocab_size", "poison", "implementation"))


def relay(tokens, lens):
    return testing.array(tokens, testing.token_dtype()), testing.array(lens, jnp.int32)


def i32(*values):
    return testing.array(values, jnp.int32)


def test_every_case_equals_the_oracle(case, implementation, token_width):
    args, static = cases.make_inputs(case)
    expected = relay_oracle.resolved(*args, **static)
    run = functools.partial(resolve_future, **static, implementation=implementation)
    relay_oracle.assert_resolved(jax.jit(run)(*args), expected)


def test_each_error_has_its_bit_and_a_legal_value(implementation):
    tokens, lens = relay([0, 10, -1, 3, 11], [1, 5, 6, 0, -2])
    result = jitted(
        tokens, lens, (), i32(1, 2, 3, 4), vocab_size=VOCAB, implementation=implementation
    )
    np.testing.assert_array_equal(
        result.errors,
        [
            TOKEN_OUT_OF_RANGE,
            TOKEN_OUT_OF_RANGE,
            LEN_NOT_POSITIVE,
            LEN_NOT_POSITIVE | TOKEN_OUT_OF_RANGE,
        ],
    )
    np.testing.assert_array_equal(result.tokens, [9, 0, 3, 9])
    np.testing.assert_array_equal(result.lens, [5, 6, 1, 1])


def test_the_padding_row_is_no_error_and_is_never_poisoned(implementation):
    tokens, lens = relay([-7, 4, 5, 6], [-7, 3, 2, 1])
    result = jitted(
        tokens,
        lens,
        (),
        i32(0, 0, 0),
        vocab_size=VOCAB,
        poison=True,
        implementation=implementation,
    )
    np.testing.assert_array_equal(result.errors, [0, 0, 0])
    np.testing.assert_array_equal(result.output_tokens, [-7, 4, 5, 6])
    np.testing.assert_array_equal(result.seq_lens, [-7, 3, 2, 1])


def test_poison_marks_exactly_the_rows_read(implementation):
    tokens, lens = relay([0, 4, 5, 6], [1, 7, 8, 9])
    result = jitted(
        tokens, lens, (), i32(3, 0, 1), vocab_size=VOCAB, poison=True, implementation=implementation
    )
    np.testing.assert_array_equal(result.output_tokens, [0, 10, 5, 10])
    np.testing.assert_array_equal(result.seq_lens, [1, 0, 8, 0])


def test_a_second_read_of_poisoned_rows_shows_both_bits(implementation):
    read = functools.partial(jitted, vocab_size=VOCAB, poison=True, implementation=implementation)
    first = read(*relay([0, 4, 5, 6], [1, 7, 8, 9]), (), i32(1, 3, 0))
    again = read(first.output_tokens, first.seq_lens, (), i32(2, 3, 0))
    np.testing.assert_array_equal(first.errors, [0, 0, 0])
    np.testing.assert_array_equal(again.errors, [0, LEN_NOT_POSITIVE | TOKEN_OUT_OF_RANGE, 0])


def test_a_row_outside_the_relay_counts_as_the_padding_row(implementation):
    tokens, lens = relay([7, 4, 5, 6, 8], [2, 3, 3, 3, 3])
    result = jitted(
        tokens, lens, (), i32(-1, 5, 1, 2**31 - 1), vocab_size=VOCAB, implementation=implementation
    )
    np.testing.assert_array_equal(result.tokens, [7, 7, 4, 7])
    np.testing.assert_array_equal(result.errors, [0, 0, 0, 0])


def test_carry_keeps_its_structure_and_its_nans(implementation):
    carry = {"a": (testing.array([0.0, np.nan, 2.0], jnp.bfloat16),), "none": None, "empty": ()}
    result = jitted(
        *relay([0, 1, 2], [1, 1, 1]), carry, i32(1, 2), vocab_size=VOCAB,
        implementation=implementation,
    )  # fmt: skip
    assert jax.tree.structure(result.carry) == jax.tree.structure(carry)
    np.testing.assert_array_equal(np.asarray(result.carry["a"][0], np.float32), [np.nan, 2.0])


def test_the_relay_is_returned_as_it_is_without_poison(implementation):
    tokens, lens = relay([0, 4], [1, 7])
    result = resolve_future(
        tokens, lens, (), i32(1), vocab_size=VOCAB, implementation=implementation
    )
    assert result.output_tokens is tokens
    assert result.seq_lens is lens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((2, 1), np.int32)}, r"rows has shape \(2, 1\), but must be \[B\]"),
        ({"seq_lens": np.zeros(3, np.int16)}, "seq_lens is int16, but must be int32"),
        ({"output_tokens": np.zeros(3, np.float32)}, "output_tokens is float32, but tokens are"),
        ({"output_tokens": np.zeros(4, np.int32)}, r"\[S\+1\] needs \(3,\) here"),
        ({"vocab_size": 0}, "vocab_size=0 is below 1"),
        ({"carry": {"h": np.zeros((2, 8))}}, r"carry\['h'\] has shape .* S\+1 = 3"),
        ({"implementation": "cuda"}, "resolve_future: implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "output_tokens": np.zeros(3, np.int32),
        "seq_lens": np.ones(3, np.int32),
        "carry": (),
        "rows": np.zeros(2, np.int32),
        "vocab_size": VOCAB,
    }
    with pytest.raises(ValueError, match=message):
        resolve_future(**(arguments | change))
