"""F16: what rejection sampling emits is distributed as the target, whatever drafts it is given."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.future_map import token_dtype
from jaxspec.rejection import rejection_choice
from jaxspec.sampling import SamplingRows, filtered_scores, greedy_tokens, position_gumbel
from tests.harness import expected, request, run, tokens_of
from tests.told import told_engine

VOCAB, BLOCK, RUNS = 4, 3, 20_000
QUANTILE_999 = {0: 1e-9, 1: 10.83, 2: 13.82, 3: 16.27}
# The target's logits behind each token.
TABLE = np.log([[0.5, 0.25, 0.15, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25] * 4, [0.05, 0.05, 0.1, 0.8]])
DRAFTERS = {
    "near": TABLE + 0.3 * np.cos(np.arange(16).reshape(4, 4)),
    "far": -2.0 * TABLE,
    "zeros": np.where(np.eye(4, dtype=bool), -np.inf, TABLE),
    "equal": TABLE,
}
FILTERS = {"plain": {}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.8}}


def sampling_rows(num_rows, *, top_k=0, top_p=1.0):
    keys = np.stack([np.arange(num_rows), np.full(num_rows, 5)], axis=1)
    return SamplingRows(
        temperature=jnp.ones((num_rows,), jnp.float32),
        top_k=jnp.full((num_rows,), top_k, jnp.int32),
        top_p=jnp.full((num_rows,), top_p, jnp.float32),
        min_p=jnp.zeros((num_rows,), jnp.float32),
        key=jnp.asarray(keys, jnp.uint32),
    )


@functools.partial(jax.jit, static_argnames="certain")
def run_blocks(table, drafter, rows, num_drafts, *, certain=False):
    """A block a row behind token 0: (chosen [B, 3], drafts [B, 2], p [4, 4] of filtered tables).

    Drafts are one behind the other, each from the drafter's distribution behind the last.
    """
    positions = jnp.broadcast_to(jnp.arange(7, 10, dtype=jnp.int32), (RUNS, BLOCK))
    noise = position_gumbel(rows.key, positions, VOCAB)
    log_p = jax.nn.log_softmax(filtered_scores(jnp.broadcast_to(table, (RUNS, 4, 4)), rows))
    log_q = jax.nn.log_softmax(filtered_scores(jnp.broadcast_to(drafter, (RUNS, 4, 4)), rows))
    token, drafts, behind, q = jnp.zeros((RUNS, 1, 1), jnp.int32), [], [], []
    for place in range(BLOCK):
        behind.append(jnp.take_along_axis(log_p, token, axis=1)[:, 0])
        q.append(jnp.take_along_axis(log_q, token, axis=1)[:, 0])
        scores = q[-1] if certain else q[-1] + noise[:, place]
        token = greedy_tokens(scores)[:, None, None].astype(jnp.int32)
        drafts.append(token[:, 0, 0])
    drafts = jnp.stack(drafts[:-1], axis=1)
    chosen = rejection_choice(
        jnp.stack(behind, axis=1),
        None if certain else jnp.stack(q[:-1], axis=1),
        drafts,
        num_drafts,
        rows.key,
        positions,
    )
    return chosen, drafts, jnp.exp(log_p[0]), jnp.exp(log_q[0])


def blocks(drafter, filters, *, num_drafts=2, certain=False):
    rows = sampling_rows(RUNS, **FILTERS[filters])
    table, other = (jnp.asarray(each, jnp.float32) for each in (TABLE, DRAFTERS[drafter]))
    counts = jnp.full((RUNS,), num_drafts, jnp.int32)
    return [np.asarray(each) for each in run_blocks(table, other, rows, counts, certain=certain)]


def check_distribution(tokens, probs):
    """Chi-square below the 0.999 quantile; nothing of probability 0."""
    counts = np.bincount(tokens, minlength=VOCAB)
    possible = probs > 0
    assert not counts[~possible].any(), "a token that the target never says"
    expected = probs[possible] / probs[possible].sum() * counts.sum()
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    assert counts.sum() > 150 and chi_square < QUANTILE_999[int(possible.sum()) - 1]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("certain", [False, True], ids=["q", "certain"])
def test_each_position_is_distributed_as_the_target(drafter, filters, certain):
    """F16: 20,000 blocks, V = 4; first, second and third position, behind each token before."""
    chosen, drafts, p, _ = blocks(drafter, filters, certain=certain)
    check_distribution(chosen[:, 0], p[0])
    stands = np.ones(RUNS, bool)
    for place in (1, 2):
        stands &= chosen[:, place - 1] == drafts[:, place - 1]
        for token in range(VOCAB):
            here = stands & (drafts[:, place - 1] == token)
            if here.sum() > 150:
                check_distribution(chosen[here, place], p[token])


@pytest.mark.parametrize("drafter", ["near", "far", "zeros"])
def test_a_rejection_draws_from_what_the_drafter_missed(drafter):
    """F16: max(p - q, 0), normalised, of the rows whose first draft was rejected."""
    chosen, drafts, p, q = blocks(drafter, "plain")
    rejected = chosen[:, 0] != drafts[:, 0]
    check_distribution(chosen[rejected, 0], np.maximum(p[0] - q[0], 0.0))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_as_many_drafts_are_accepted_as_can_be(drafter):
    """1 - TV(p, q); five standard errors."""
    chosen, drafts, p, q = blocks(drafter, "plain")
    most = np.minimum(p[0], q[0]).sum()
    assert abs((chosen[:, 0] == drafts[:, 0]).mean() - most) <= 5 * np.sqrt(0.25 / RUNS)


def test_a_draft_that_the_target_never_says_is_never_accepted():
    log_p = jnp.log(jnp.asarray([[[0.0, 1.0, 0.0, 0.0]] * 2] * 50, jnp.float32))
    log_q = jnp.log(jnp.asarray([[[1.0, 0.0, 0.0, 0.0]]] * 50, jnp.float32))
    drafts, count = jnp.zeros((50, 1), jnp.int32), jnp.ones(50, jnp.int32)
    positions = jnp.asarray([[3, 4]] * 50, jnp.int32)
    keys = jnp.asarray([[0, seed] for seed in range(50)], jnp.uint32)
    chosen = jax.jit(rejection_choice)(log_p, log_q, drafts, count, keys, positions)
    assert chosen.tolist() == [[1, 1]] * 50
    assert chosen.dtype == token_dtype()


def test_a_coin_of_0_accepts_nothing_impossible(monkeypatch):
    import jaxspec.rejection as rejection

    def zeros(keys, positions):
        return jnp.zeros(positions.shape, jnp.float32)

    monkeypatch.setattr(rejection, "_uniform", zeros)
    log_p = jnp.log(jnp.asarray([[[0.0, 0.5, 0.5, 0.0]] * 2], jnp.float32))
    log_q = jnp.log(jnp.asarray([[[0.25] * 4]], jnp.float32))
    count, positions = jnp.asarray([1], jnp.int32), jnp.asarray([[3, 4]], jnp.int32)
    keys = jnp.asarray([[0, 1]], jnp.uint32)
    choose = jax.jit(lambda draft: rejection_choice(log_p, log_q, draft, count, keys, positions))
    first = [choose(jnp.full((1, 1), x))[0, 0].item() for x in range(4)]
    assert first[1:3] == [1, 2] and {first[0], first[3]} <= {1, 2}


def test_a_place_without_a_draft_is_drawn_from_the_target():
    """None meant: whatever stands there is not looked at."""
    chosen, _, p, _ = blocks("far", "plain", num_drafts=0)
    check_distribution(chosen[:, 0], p[0])


def test_drafts_by_the_targets_own_noise_agree_more_often_than_the_likeliest():
    """F16: keyed noise on both sides, per token behind 0: at least (1 - TV) / (1 + TV) agree."""
    _, drafts, p, q = blocks("near", "plain")
    rows = sampling_rows(RUNS)
    noise = np.asarray(position_gumbel(rows.key, jnp.full((RUNS, 1), 7, jnp.int32), VOCAB))[:, 0]
    target = np.argmax(np.log(p[0]) + noise, axis=-1)
    keyed, likeliest = (drafts[:, 0] == target).mean(), (target == q[0].argmax()).mean()
    variation = 1 - np.minimum(p[0], q[0]).sum()
    assert keyed >= (1 - variation) / (1 + variation) - 0.01
    assert keyed > 0.85 and likeliest < 0.55, (keyed, likeliest)


def test_the_engine_by_rejection_leaves_certain_rows_as_they_are():
    """Greedy rows, and sampled ones of a single possible token, have one text."""
    asked = [
        request("g", [1, 2], max_tokens=12, ignore_eos=True),
        request("s", [2, 9, 4], max_tokens=12, ignore_eos=True, temperature=1.0, top_k=1, seed=1),
    ]
    plain = [replace(each, params=replace(each.params, temperature=0.0)) for each in asked]
    engine = told_engine(*plain, accepts=3, accept_rule="rejection")
    outputs = run(engine, *asked)
    for each in plain:
        assert tokens_of(outputs[each.request_id]) == list(expected(each))
        assert outputs[each.request_id].metrics.accept_lengths[:2] == [4, 4]
