"""The chunked loss against a plain one and its numpy oracles."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.anchors import Labels, slot_decay
from jaxspec.training.loss import LossSpec, block_loss, dpace_weights

ROWS, BLOCKS, SLOTS, WIDTH, VOCAB = 2, 4, 3, 8, 11


def arrays(seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = (ROWS, BLOCKS, SLOTS)
    valid = np.arange(SLOTS) < rng.integers(0, SLOTS + 1, shape[:2])[..., None]
    labels = Labels(
        token_ids=jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        valid=jnp.asarray(valid),
        source=jnp.zeros(shape, jnp.int32),
    )
    hidden, teacher = rng.normal(size=(2, *shape, WIDTH)).astype(np.float32)
    head = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(head), labels, jnp.asarray(teacher)


def dpace_oracle(probs: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """One block, by the formula's own two loops."""
    out = np.zeros(len(probs))
    for j in range(len(probs)):
        for m in range(j, len(probs)):
            if valid[m]:
                factors = [0.5 * probs[i] + 0.5 for i in range(m + 1) if valid[i]]
                out[j] += np.prod(factors)
    return np.where(valid, out, 0.0)


@cache
def plain(spec: LossSpec):
    """The loss with all logits at once, and its gradient by autodiff."""

    def run(hidden, head, labels, teacher):
        logits = jnp.einsum("rake,ve->rakv", hidden, head)
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, labels.token_ids[..., None], -1)[..., 0]
        wanted = jax.nn.softmax(jnp.einsum("rake,ve->rakv", teacher, head))
        soft = -(wanted * log_probs).sum(-1)
        losses = -(1 - spec.soft_labels) * chosen + spec.soft_labels * soft
        if spec.weighting == "dpace":
            flat = chosen.reshape(-1, SLOTS), labels.valid.reshape(-1, SLOTS)
            weights = dpace_weights(*flat).reshape(chosen.shape)
        else:
            decay = jnp.asarray(slot_decay(spec.block_size, spec.gamma))[None, None]
            weights = jnp.where(labels.valid, decay, 0.0)
        return (weights * losses).sum()

    return jax.jit(jax.value_and_grad(run))


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize(
    ("weighting", "soft"), [("decay", 0.0), ("decay", 0.3), ("dpace", 0.0), ("dpace", 1.0)]
)
def test_loss_and_gradient_equal_those_of_all_logits_at_once(chunk, weighting, soft):
    hidden, head, labels, teacher = arrays()
    spec = LossSpec(block_size=4, weighting=weighting, soft_labels=soft, chunk=chunk)
    run = jax.jit(
        jax.value_and_grad(
            lambda h: block_loss(h, head, labels, teacher if soft else None, spec), has_aux=True
        )
    )
    (loss, (sums, _)), grad = run(hidden)
    expected, expected_grad = plain(spec)(hidden, head, labels, teacher)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(sums.loss, loss, rtol=0)
    np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=2e-6)


def test_dpace_weights_equal_the_formula():
    rng = np.random.default_rng(1)
    probs = rng.uniform(0.01, 0.99, (6, 4)).astype(np.float32)
    valid = np.array(
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [1] * 4]
    )
    weights = dpace_weights(jnp.log(probs), jnp.asarray(valid, bool))
    expected = [dpace_oracle(p, v) for p, v in zip(probs, valid.astype(bool), strict=True)]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_sums_count_correct_slots_and_simulate_the_accept_length():
    """Blocks that guess 2, 0 and 1 leading slots of 3, 3 and 1: accept lengths 3, 1 and 2."""
    head = 5.0 * np.eye(VOCAB, WIDTH, dtype=np.float32)
    guesses = np.array([[[1, 2, 3], [4, 5, 6], [7, 1, 1], [1, 1, 1]]])
    tokens = np.array([[[1, 2, 0], [0, 5, 6], [7, 0, 0], [1, 1, 1]]])
    valid = np.array([[[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]], bool)
    labels = Labels(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(valid), jnp.zeros(tokens.shape, jnp.int32)
    )
    spec = LossSpec(block_size=4, gamma=2.0, chunk=2)
    _, (sums, lengths) = block_loss(
        jnp.asarray(head[guesses]), jnp.asarray(head), labels, None, spec
    )
    assert lengths.tolist() == [[3.0, 1.0, 2.0, 1.0]]
    assert sums.correct.tolist() == [2.0, 2.0, 1.0]
    assert sums.seen.tolist() == [3.0, 2.0, 2.0]
    assert (sums.accept_length, sums.blocks) == (6.0, 3.0)
    np.testing.assert_allclose(sums.norm, 3 + 2 * np.exp(-0.5) + 2 * np.exp(-1.0), rtol=1e-6)


def test_dpace_is_divided_by_the_number_of_blocks():
    hidden, head, labels, _ = arrays()
    spec = LossSpec(block_size=4, weighting="dpace", chunk=8)
    _, (sums, _) = block_loss(hidden, head, labels, None, spec)
    assert float(sums.norm) == float(sums.blocks) == np.asarray(labels.valid)[..., 0].sum()


def test_an_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="loss is 'flat'; it must be one of decay, dpace"):
        LossSpec(block_size=4, weighting="flat")
