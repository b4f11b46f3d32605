"""Products, norms and rotary frequencies against numpy and transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import embed_tokens, linear, logits_of, rms_norm, rope_inv_freq
from tests.models.checkpoints import CONFIGS, load


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [(1, 1), (1, 8), (3, 5), (2, 300)])
def test_linear_multiplies_by_out_by_in_weights(rows):
    x, weight, bias = normal(*rows, 40), normal(24, 40, seed=1), normal(24, seed=2)
    y = jax.jit(linear)(x, weight, bias)
    np.testing.assert_allclose(y, x @ weight.T + bias, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 8])
def test_logits_over_a_large_vocabulary_equal_numpy(rows):
    """XLA:CPU of jax 0.10.2 gets some products over 32,769 rows and more wrong when fused."""
    hidden, head = normal(rows, 1, 64), normal(49152, 64, seed=1)

    @jax.jit
    def program(hidden, head):
        logits = logits_of(hidden, head)
        return logits, jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)

    logits, best, total = program(hidden, head)
    expected = hidden.astype(np.float64) @ head.T.astype(np.float64)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(best, np.argmax(expected, axis=-1))
    largest = expected.max(axis=-1)
    reference = largest + np.log(np.exp(expected - largest[..., None]).sum(axis=-1))
    np.testing.assert_allclose(total, reference, rtol=1e-5)


def test_logits_of_bfloat16_are_summed_in_float32():
    hidden = jnp.ones((1, 1, 1024), jnp.bfloat16)
    head = jnp.concatenate([jnp.ones((1, 1023)), jnp.full((1, 1), 2.0**-7)], 1).astype(jnp.bfloat16)
    assert float(logits_of(hidden, head)[0, 0, 0]) == 1023 + 2.0**-7


def test_rms_norm_works_in_float32():
    x, weight = normal(2, 3, 16) * 1000, normal(16, seed=1)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5), expected, 1e-6)
    half = rms_norm(jnp.asarray(x, jnp.float16), jnp.asarray(weight, jnp.float16), 1e-5)
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, expected, rtol=4e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rotary_frequencies_equal_transformers(name):
    """The llama fixture has Llama 3 scaling with kept, mixed and stretched wavelengths."""
    config, expected = CONFIGS[name], load(name)["inv_freq"]
    inv_freq = rope_inv_freq(config.head_dim, config.rope_theta, config.rope_scaling)
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, expected, rtol=2e-7)


def test_an_id_outside_the_vocabulary_reads_the_nearest_row():
    table = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    ids = jnp.array([[-1, 0, 7]], jnp.int32)
    np.testing.assert_array_equal(embed_tokens(table, ids), [[[0, 1], [0, 1], [4, 5]]])
