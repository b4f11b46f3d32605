"""What chooses tokens on a GPU, without a branch, chooses what the reference chooses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from jaxspec.engine.choose import choose_tokens, token_log_probs
from jaxspec.future_map import token_dtype
from jaxspec.logit_edits import Editing, EditRows, preceding_in_chain
from jaxspec.mode import Mode
from jaxspec.sampling import SamplingRows

ROWS, BLOCK, VOCAB = 6, 3, 24
GPU = Kernels(filter_thresholds="triton_interpret")


def make_inputs(*, penalised, sampled):
    """Logits in steps of a half, and rows of which every other one asks for something."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.integers(-9, 9, (ROWS, BLOCK, VOCAB)) / 2, jnp.float32)
    positions = jnp.asarray(rng.integers(1, 90, (ROWS, BLOCK)), jnp.int32)
    asks = np.arange(ROWS) % 2 == 1
    sampling = SamplingRows.greedy(ROWS)
    if sampled:
        sampling = sampling.replace(
            temperature=jnp.where(asks, 0.75, 0.0).astype(jnp.float32),
            top_k=jnp.asarray([0, 3, 0, 0, 5, 7], jnp.int32),
            top_p=jnp.asarray([1, 1, 1, 0.5, 0.5, 0.75], jnp.float32),
            key=jnp.asarray(rng.integers(0, 1 << 30, (ROWS, 2)), jnp.uint32),
        )
    edits = EditRows.neutral(ROWS, VOCAB)
    if penalised:
        counts = jnp.asarray(rng.integers(0, 3, edits.counts.shape), edits.counts.dtype)
        asked = np.where(asks[:, None], [0.5, 1.5, 2.0], [0.0, 0.0, 1.0])
        edits = edits.replace(counts=counts, penalties=jnp.asarray(asked, jnp.float32))
    block = jnp.asarray(rng.integers(0, VOCAB, (ROWS, BLOCK)), token_dtype())
    editing = Editing(edits, jnp.full((ROWS, 2), VOCAB, token_dtype()))
    editing = editing._replace(before=preceding_in_chain(block, edits.tail))
    return logits, positions, sampling, editing


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.SAMPLED, Mode.EDITED], ids=str)
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_choices_without_branches_are_the_same(mode, penalised, sampled):
    args = make_inputs(penalised=penalised, sampled=sampled)
    run = functools.partial(jax.jit(choose_tokens, static_argnames=("mode", "kernels")), *args)
    tokens, finite = run(mode=mode, kernels=GPU)
    chex.assert_shape((tokens, finite), (ROWS, BLOCK))
    chex.assert_type((tokens, finite), (token_dtype(), bool))
    for got, want in zip((tokens, finite), run(mode=mode, kernels=Kernels()), strict=True):
        np.testing.assert_array_equal(got, want)
    choose = functools.partial(choose_tokens, mode=mode, kernels=GPU)
    assert "cond[" not in str(jax.make_jaxpr(choose)(*args))


def test_log_probs_without_branches_are_the_same():
    args = make_inputs(penalised=True, sampled=True)
    run = functools.partial(jax.jit(token_log_probs, static_argnames=("mode", "kernels")), *args)
    got, want = (run(mode=Mode.EDITED, kernels=each) for each in (GPU, Kernels()))
    np.testing.assert_array_equal(got, want)
