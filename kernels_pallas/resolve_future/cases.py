"""Named shapes of `resolve_future`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels_pallas.testing import array, token_dtype

# An EAGLE drafter's: top-k probabilities and ids, hidden state; in tests a narrow one.
EAGLE = (((8,), "float32"), ((8,), "int32"), ((4096,), "bfloat16"))
NARROW_EAGLE = (((8,), "float32"), ((8,), "int32"), ((96,), "bfloat16"))


class Case(NamedTuple):
    """A batch, padded by row 0, of a relay with bad lengths and tokens in it."""

    name: str
    batch: int
    carry: tuple[tuple[tuple[int, ...], str], ...] = ()  # trailing shape and dtype of each leaf
    poison: bool = False
    vocab_size: int = 151_936


CASES = (
    Case("one row", 1),
    Case("odd batch", 7),
    Case("prime batch poisoned", 13, poison=True, vocab_size=11),
    Case("eagle carry", 5, carry=NARROW_EAGLE),
    Case("carry of any rank", 3, carry=(((), "bool"), ((3, 5), "float16"), ((1,), "uint8"))),
    Case("carry past a tile, poisoned", 2, carry=(((2049,), "bfloat16"),), poison=True),
    Case("empty carry leaf", 4, carry=(((0,), "float32"), ((2, 1), "int16"))),
)

BENCH_CASES = tuple(
    Case(f"{kind}batch {batch}", batch, carry=carry)
    for kind, carry in (("", ()), ("eagle ", EAGLE))
    for batch in (1, 8, 32, 256)
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = generator(case.name)
    return make_relay(case, rng), {"vocab_size": case.vocab_size, "poison": case.poison}


def generator(name: str) -> np.random.Generator:
    """The case's own random numbers, the same in every process."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def make_relay(case: Case, rng: np.random.Generator, max_len: int = 5000) -> tuple[Any, ...]:
    """output_tokens, seq_lens, carry, rows: a third of them bad, a quarter of the batch padding.

    Row 0 holds nonsense, since whatever it holds must be no error.
    """
    num_rows = case.batch + 4
    tokens = rng.integers(0, case.vocab_size, num_rows)
    bad_tokens = rng.choice([-1, case.vocab_size, -(2**31), 2**31 - 1], num_rows)
    tokens = np.where(rng.random(num_rows) < 1 / 3, bad_tokens, tokens)
    lens = rng.integers(1, max_len + 1, num_rows)
    lens = np.where(rng.random(num_rows) < 1 / 3, rng.choice([0, -5], num_rows), lens)
    tokens[0], lens[0] = -7, -7
    rows = 1 + rng.permutation(num_rows - 1)[: case.batch]
    rows[case.batch - case.batch // 4 :] = 0
    carry = {
        f"leaf{i}": _values(rng, (num_rows, *trailing), jnp.dtype(dtype))
        for i, (trailing, dtype) in enumerate(case.carry)
    }
    return (
        array(tokens, token_dtype()),
        array(lens, jnp.int32),
        carry,
        array(rows, jnp.int32),
    )


def _values(rng, shape, dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return array(rng.standard_normal(shape), dtype)
    return array(rng.integers(0, 2 if dtype.kind == "b" else 100, shape), dtype)
