from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from kernels_pallas import testing
from kernels_pallas.kv_write import kv_write
from kernels_pallas.write_and_attend import cases, write_and_attend
from tests.kernels import attention_oracle, jitting, kv_oracle

jitted = functools.cache(functools.partial(jitting.jit, write_and_attend))
jitted_kv_write = functools.cache(functools.partial(jitting.jit, kv_write))
ARRAYS = ("q_norm", "k_norm", "layer", "block_mask")
OF_ATTENTION = ("causal", "window", "block_mask")


def run(args, implementation, **static):
    arrays = {name: static.pop(name) for name in ARRAYS if name in static}
    return jax.tree.map(np.asarray, jitted(implementation, **static)(*args, **arrays))


@functools.cache
def expected(case):
    """The oracle's result and pages, and the plain ones in the case's own precision."""
    args, static = cases.make_inputs(case)
    of_attention = {name: static[name] for name in OF_ATTENTION if name in static}
    of_writing = {name: value for name, value in static.items() if name not in OF_ATTENTION}
    q, kv_pages = kv_oracle.write(*args[:5], **of_writing)
    out = attention_oracle.attend(q, kv_pages, *args[5:], **of_attention)
    exact = tuple(testing.array(each, "float32") for each in (out, kv_pages))
    return exact, exact if case.dtype == "float32" else run(args, "xla", **static)


@pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
def test_every_case_equals_the_oracle(case, implementation):
    args, static = cases.make_inputs(case)
    exact, plain = expected(case)
    result = run(args, implementation, **static)
    assert testing.compare_results(result, plain, exact) is None
    # What a later step reads must not depend on which of the two ways wrote it.
    static = {name: value for name, value in static.items() if name not in OF_ATTENTION}
    arrays = {name: static.pop(name) for name in ARRAYS if name in static}
    _, kv_pages = jitted_kv_write(implementation, **static)(*args[:5], **arrays)
    differs = np.abs(np.asarray(kv_pages, np.float32) - np.asarray(result[1], np.float32))
    assert np.nanmax(differs) <= (2e-6 if case.dtype == "float32" else 0)
