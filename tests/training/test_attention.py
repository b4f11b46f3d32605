"""Block attention in chunks, and against one masked softmax."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers import LayerSpec
from jaxspec.training.anchors import Anchors
from jaxspec.training.attention import Context, block_attention
from tests.training.tiny import device_rows, random_rows

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, causal=True, window=5)
PACKED = random_rows()
ANCHORS = np.array([0, 3, 9, 14])
SIZE = 4


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, blocks, length = len(PACKED), len(ANCHORS), PACKED.token_ids.shape[1]
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "q": draw(rows, blocks, SIZE, 4, 8),
        "k": draw(rows, blocks, SIZE, 2, 8),
        "v": draw(rows, blocks, SIZE, 2, 8),
        "ck": draw(rows, length, 2, 8),
        "cv": draw(rows, length, 2, 8),
    }


@cache
def attend_with_grad(chunk: int):
    index = jnp.asarray(np.tile(ANCHORS, (len(PACKED), 1)), jnp.int32)
    anchors = Anchors(index, jnp.ones(index.shape, bool))

    def run(x):
        out = block_attention(
            x["q"],
            x["k"],
            x["v"],
            Context(x["ck"], x["cv"]),
            device_rows(PACKED),
            anchors,
            spec=SPEC,
            chunk=chunk,
        )
        return (out**2).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(inputs())
    return out, grads


def test_chunks_change_neither_result_nor_gradient():
    out, grads = attend_with_grad(2)
    whole, expected = attend_with_grad(4)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)
    for name, value in grads.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5)


def test_attention_equals_one_softmax_over_what_each_query_may_see():
    """In float64, one query at a time: position by position, as the rule is worded."""
    out, _ = attend_with_grad(4)
    x = inputs()
    for row in range(len(PACKED)):
        segments = PACKED.segments[row]
        for block, anchor in enumerate(ANCHORS):
            for slot in range(SIZE):
                at = anchor + slot
                seen = [j for j in range(anchor) if segments[j] == segments[anchor] and at - j < 5]
                for head in range(4):
                    own = [x["k"][row, block, m, head // 2] for m in range(slot + 1)]
                    keys = np.array([x["ck"][row, j, head // 2] for j in seen] + own, np.float64)
                    own = [x["v"][row, block, m, head // 2] for m in range(slot + 1)]
                    values = np.array([x["cv"][row, j, head // 2] for j in seen] + own)
                    scores = np.exp(keys @ x["q"][row, block, slot, head] / np.sqrt(8))
                    expected = scores @ values / scores.sum()
                    np.testing.assert_allclose(
                        out[row, block, slot, head], expected, rtol=0, atol=1e-5
                    )
