"""Filters against plain numpy, noise that depends on seed and position alone, and distributions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.future_map import token_dtype
from jaxspec.sampling import (
    SamplingRows,
    filter_mask,
    greedy_tokens,
    position_gumbel,
    sample_tokens,
)

VOCAB = 16
_filter_mask = jax.jit(filter_mask)
_sample_tokens = jax.jit(sample_tokens)
_position_gumbel = jax.jit(position_gumbel, static_argnums=2)
DRAWS, FEW = 20_000, 6  # one shape for all long series: compiling takes the time


def rows_with(*settings, key=(7, 9)):
    """SamplingRows of dicts of settings; what is not named is off, temperature 1."""

    def column(name, neutral, dtype):
        return jnp.asarray([setting.get(name, neutral) for setting in settings], dtype)

    keys = [setting.get("key", key) for setting in settings]
    return SamplingRows(
        temperature=column("temperature", 1.0, jnp.float32),
        top_k=column("top_k", 0, jnp.int32),
        top_p=column("top_p", 1.0, jnp.float32),
        min_p=column("min_p", 0.0, jnp.float32),
        key=jnp.asarray(keys, jnp.uint32),
    )


def reference_mask(scores, *, top_k=0, top_p=1.0, min_p=0.0):
    """What the filters keep of one position, by sorting, in float64."""
    scores = scores.astype(np.float64)
    keep = np.ones(scores.shape, bool)
    if 0 < top_k < len(scores):
        keep &= scores >= np.sort(scores)[-top_k]
    weights = np.where(keep, np.exp(scores - scores.max()), 0.0)
    if top_p < 1.0:
        order = np.sort(np.unique(scores))[::-1]
        mass = np.array([weights[scores >= score].sum() for score in order])
        keep &= scores >= order[np.argmax(mass >= top_p * weights.sum())]
    if min_p:
        keep &= scores >= scores.max() + np.log(min_p)
    return keep


def random_scores(kind, seed):
    rng = np.random.default_rng(seed)
    match kind:
        case "distinct":
            return rng.normal(size=VOCAB).astype(np.float32) * 3
        case "ties":
            return rng.integers(-2, 3, VOCAB).astype(np.float32)
        case "masked":
            return np.where(rng.random(VOCAB) < 0.5, -np.inf, rng.normal(size=VOCAB)).astype("f4")
        case "flat":
            return np.full(VOCAB, 1.5, np.float32)
    raise KeyError(kind)


SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 0.37},
    {"top_p": 1e-7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.3},
]


@pytest.mark.parametrize("kind", ["distinct", "ties", "masked", "flat"])
def test_filters_keep_what_sorting_keeps(kind):
    """Rows of all settings side by side in one batch, four positions each."""
    scores = np.stack(
        [[random_scores(kind, 10 * b + n) for n in range(4)] for b in range(len(SETTINGS))]
    )
    kept = _filter_mask(jnp.asarray(scores), rows_with(*SETTINGS))
    chex.assert_shape(kept, scores.shape)
    chex.assert_type(kept, bool)
    for b, setting in enumerate(SETTINGS):
        for n in range(4):
            expected = reference_mask(scores[b, n], **setting)
            assert np.asarray(kept[b, n]).tolist() == expected.tolist(), (setting, scores[b, n])


def kept_of(scores, **setting):
    """Ids that the filters keep of one position, in a batch of the shape above."""
    scores = jnp.asarray(scores + [-9.0] * (VOCAB - len(scores)), jnp.float32)
    batch = jnp.broadcast_to(scores, (len(SETTINGS), 4, VOCAB))
    kept = _filter_mask(batch, rows_with(*[setting] * len(SETTINGS)))
    return np.flatnonzero(kept[0, 0]).tolist()


def test_equal_scores_stay_together():
    assert kept_of([1.0, 3.0, 3.0, 3.0, 0.0], top_k=2) == [1, 2, 3]


@pytest.mark.parametrize("top_p", [1e-30, 1e-39, 1e-46])
def test_a_top_p_that_rounds_to_nothing_keeps_the_likeliest(top_p):
    assert kept_of([1.0, 3.0, 3.0, 2.0], top_p=top_p) == [1, 2]


def test_zero_and_minus_zero_are_equal_scores():
    assert kept_of([0.0, -0.0, -1.0, 0.0], top_k=1) == [0, 1, 3]


def test_top_p_counts_what_top_k_kept():
    # Of 0.4, 0.3, 0.2, 0.1, top-k 2 leaves 4/7 and 3/7: top-p 0.5 is met by the first alone.
    scores = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept_of(scores, top_k=2, top_p=0.5) == [0]
    assert kept_of(scores, top_p=0.5) == [0, 1]


def logits_of(batch, positions, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch, positions, VOCAB)).astype(np.float32))


def test_greedy_takes_the_first_highest(x64):
    logits = jnp.asarray([[0.0, 5.0, 5.0, -np.inf], [-1.0, -2.0, -0.5, -0.5]], jnp.float32)
    tokens = greedy_tokens(logits)
    chex.assert_type(tokens, token_dtype())
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("vocab_size", [1024, 1000], ids=["chunks", "one piece"])
def test_greedy_takes_the_first_highest_of_many(vocab_size, x64):
    """Ties lie in one chunk, in several, and everywhere; a CPU looks through chunks of 128."""
    logits = np.random.default_rng(0).integers(0, 9, (6, 2, vocab_size)).astype(np.float32)
    logits[0, 0, [127, 128, 900]] = 20.0
    logits[1, 0, [3, 999]] = 20.0
    logits[2, 0] = -np.inf
    logits[3, 0] = 1.5
    logits[4, 0, -1] = 20.0
    tokens = jax.jit(greedy_tokens)(jnp.asarray(logits))
    chex.assert_type(tokens, token_dtype())
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_rows_beside_sampled_ones_equal_argmax():
    """F15: temperatures 0, 0.7, 0; masked logits in a greedy row give no NaN."""
    logits = np.array(logits_of(3, 4))
    logits[:, :, [0, -1]] -= 9.0  # the greedy ids are neither the first nor the last
    logits[0, :, ::2] = -np.inf
    rows = rows_with(
        {"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.7}, {"temperature": 0.0, "top_k": 1}
    )
    positions = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    tokens = np.asarray(_sample_tokens(jnp.asarray(logits), positions, rows))
    chex.assert_shape(tokens, (3, 4))
    chex.assert_type(tokens, token_dtype())
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    order = np.array([1, 0, 2])
    moved = rows_with({"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 0.0})
    tokens_moved = _sample_tokens(jnp.asarray(logits[order]), positions[order], moved)
    assert tokens[1].tolist() == tokens_moved[0].tolist()


def series(logits, **setting):
    """A token for each of DRAWS positions with the same logits f32[FEW]."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, DRAWS, FEW))
    positions = jnp.arange(DRAWS, dtype=jnp.int32)[None]
    return np.asarray(_sample_tokens(logits, positions, rows_with(setting, key=(0, 11))))[0]


def test_filtered_tokens_are_never_chosen():
    assert set(series([0.0, 2.0, 1.0, -1.0, 1.5, 0.5], top_k=3).tolist()) == {1, 2, 4}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-42])
def test_a_tiny_temperature_means_greedy_not_overflow(temperature):
    logits = logits_of(3, 4) * 30
    positions = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    rows = rows_with(*[{"temperature": temperature, "top_p": 0.9}] * 3)
    tokens = _sample_tokens(logits, positions, rows)
    assert tokens.tolist() == np.asarray(logits).argmax(-1).tolist()


def noise_of(keys, positions):
    keys, positions = jnp.asarray(keys, jnp.uint32), jnp.asarray(positions, jnp.int32)
    return _position_gumbel(keys, positions, VOCAB)


def test_noise_depends_on_key_and_position_alone():
    """F30: the same beside other rows, in another row, in another place of the block."""
    key, other = (1, 2), (3, 4)
    alone = noise_of([key, key, key], [[41, 41], [41, 41], [41, 41]])
    among = noise_of([other, key, other], [[41, 3], [7, 41], [0, 1]])
    chex.assert_shape(among, (3, 2, VOCAB))
    chex.assert_type(among, jnp.float32)
    assert among[1, 1].tolist() == alone[0, 0].tolist()
    assert not np.any(np.asarray(among[0, 0]) == np.asarray(alone[0, 0])), "keys do not matter"
    assert not np.any(np.asarray(among[1, 0]) == np.asarray(alone[0, 0])), "positions do not"


def test_noise_does_not_depend_on_x64():
    noise = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            noise.append(noise_of([(1, 2)] * 3, [[5, 900]] * 3).tolist())
    assert noise[0] == noise[1]


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str
)
def test_tokens_are_distributed_as_the_processed_logits(setting):
    """Chi-square at a fixed seed, 20,000 positions: below the 0.999 quantile."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 1.5], np.float32)
    tokens = series(logits, **setting)
    scores = logits / setting.get("temperature", 1.0)
    filters = {name: value for name, value in setting.items() if name != "temperature"}
    kept = reference_mask(scores, **filters)
    probs = np.where(kept, np.exp(scores), 0.0)
    probs /= probs.sum()
    counts = np.bincount(tokens, minlength=FEW)
    assert not counts[~kept].any()
    expected = probs[kept] * DRAWS
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    quantiles_999 = {2: 10.83, 3: 13.82, 4: 16.27, 5: 18.47, 6: 20.52}
    assert chi_square < quantiles_999[int(kept.sum())]


def test_neighbouring_positions_are_independent():
    """Chi-square of pairs over a vocabulary of 3."""
    tokens = series([0.0, 0.0, 0.0, -np.inf, -np.inf, -np.inf])
    counts = np.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9)
    expected = (DRAWS - 1) / 9
    assert ((counts - expected) ** 2 / expected).sum() < 26.12  # 8 degrees of freedom, 0.999


def primitives_of(jaxpr):
    """Names of all primitives of a jaxpr, inner ones included."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for value in jax.tree.leaves(tuple(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives_of(inner)
    return names


def test_sampling_never_sorts_the_vocabulary():
    jaxpr = jax.make_jaxpr(sample_tokens)(
        logits_of(2, 3), jnp.zeros((2, 3), jnp.int32), rows_with({"top_k": 2}, {"top_p": 0.5})
    )
    names = primitives_of(jaxpr.jaxpr)
    assert {"random_fold_in", "random_bits", "cond"} <= names, "the walk misses inner programs"
    assert not {name for name in names if "sort" in name or "top_k" in name}
