from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from kernels_pallas.resolve_prepare import cases, resolve_prepare
from tests.kernels import relay_oracle


def test_every_case_equals_one_oracle_after_the_other(case, implementation, token_width):
    args, static = cases.make_inputs(case)
    *relay, page_table = args
    expected = relay_oracle.resolved(
        *relay, vocab_size=static["vocab_size"], poison=static["poison"]
    )
    block = {name: static[name] for name in ("mask_token_id", "block_size", "page_size")}
    run = functools.partial(resolve_prepare, **static, implementation=implementation)
    resolved, prepared = jax.jit(run)(*args)
    relay_oracle.assert_resolved(resolved, expected)
    tokens, lens = expected[:2]
    relay_oracle.assert_prepared(prepared, relay_oracle.prepared(tokens, lens, page_table, **block))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": np.zeros((3, 4), np.int32)}, r"page_table has shape .* needs \(2, 4\)"),
        ({"rows": np.zeros(2, np.int16)}, "rows is int16, but must be int32; cast it"),
        ({"block_size": 0}, "block_size=0 is outside 1..64"),
        ({"implementation": "cuda"}, "resolve_prepare: implementation='cuda' is unknown"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "output_tokens": np.zeros(3, np.int32),
        "seq_lens": np.ones(3, np.int32),
        "carry": (),
        "rows": np.zeros(2, np.int32),
        "page_table": np.zeros((2, 4), np.int32),
        "vocab_size": 10,
        "mask_token_id": 9,
        "block_size": 4,
        "page_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        resolve_prepare(**(arguments | change))
