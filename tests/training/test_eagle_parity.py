"""EAGLE-3 as it is trained against the serving path, and the gradients of its loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.kv_pages import to_null_page
from jaxspec.drafters.base import DraftContext, IngestBatch, ModelParams
from jaxspec.drafters.eagle import build_eagle
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.models import Kernels, build_target
from jaxspec.training.anchors import Anchors, Labels
from jaxspec.training.eagle import EagleTarget, chain_hidden, init_params
from jaxspec.training.eagle_forward import chain_loss
from jaxspec.training.loss import LossSpec
from jaxspec.training.target import build_dense_forward
from tests.models.paging import block_at, page_tables
from tests.training.tiny import TARGET, VOCAB, device_rows, random_rows, target_params

PAGE = 4
NUM_DRAFTS = 4
DRAFT_VOCAB = 30
CONFIG = EagleConfig(
    has_taps=True,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    target_hidden_size=32,
    feature_layers=(0, 1, 2),
)


@functools.cache
def frozen() -> EagleTarget:
    ids = np.sort(np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB])
    return EagleTarget(target_params(), jnp.asarray(ids, jnp.int32))


def drafter_params() -> EagleParams:
    """Fresh weights, made larger, with norms that are not ones, so that what is left out shows."""
    params = init_params(CONFIG, jax.random.key(3), frozen())
    keys = iter(jax.random.split(jax.random.key(4), 4))

    def uneven(x: jax.Array) -> jax.Array:
        return x * jax.random.uniform(next(keys), x.shape, jnp.float32, 0.5, 1.5)

    names = ("input_norm", "hidden_norm", "post_norm", "norm")
    return params.replace(
        layer=jax.tree.map(lambda w: 10 * w, params.layer),
        **{name: uneven(getattr(params, name)) for name in names},
    )


@jax.jit
def trained_logits(params: EagleParams, target, rows, index, drafted, features):
    """[R, A, K, V_draft] of the chains behind tokens `index`, led along `drafted`."""
    if features is None:
        dense = build_dense_forward(TARGET, feature_layers=CONFIG.feature_layers)
        features = dense(target, rows).features
    anchors = Anchors(index, jnp.ones(index.shape, bool))
    hidden = chain_hidden(params, CONFIG, features, target.embed, rows, anchors, drafted)
    return jnp.einsum("rake,ve->rakv", hidden, params.lm_head)


@functools.cache
def served_logits():
    """(target, drafter, prompt block, its length, drafted block, forced) -> logits [K, V_draft]."""
    sizes = dict(page_size=PAGE, kernels=Kernels(), dtype=jnp.dtype("float32"))
    model = build_target(TARGET, feature_layers=CONFIG.feature_layers, **sizes)
    serving = build_eagle(CONFIG, model, block_size=NUM_DRAFTS + 1, **sizes)
    one = jnp.ones((1,), jnp.int32)

    def run(target, drafter, prompt, length, block, next_ids, forced):
        params = ModelParams(target, drafter.replace(target_ids=frozen().target_ids))
        out = model.forward(target, model.init_kv(9), prompt)
        batch = IngestBatch(one, prompt, next_ids, out.features, length, one > 0)
        state, carry = serving.ingest(params, serving.init_state(9, 1, 32), batch)
        seen = []

        def sample(logits, positions):
            seen.append(logits[0, :, frozen().target_ids])
            return forced[:, len(seen) - 1][:, None]

        serving.draft(params, state, DraftContext(one, block, carry, sample))
        return jnp.concatenate(seen, axis=1).T

    return jax.jit(run)


def served(drafter, tokens: np.ndarray, forced: np.ndarray):
    """Logits behind all but the last of some tokens, led along the forced ones."""
    length, table = len(tokens) - 1, page_tables(1, 8)
    ids = np.resize(np.append(tokens, 0), (1, 16))
    prompt = block_at(ids, [0], table, PAGE)
    valid = jnp.arange(16)[None] < length
    prompt = prompt.replace(kv_locs=to_null_page(prompt.kv_locs, valid, PAGE))
    block = block_at(np.full((1, NUM_DRAFTS + 1), tokens[-1]), [length], table, PAGE)
    following = jnp.asarray(np.roll(ids, -1), jnp.int32)
    forced = jnp.asarray(forced[None], jnp.int32)
    size = jnp.asarray([length], jnp.int32)
    return served_logits()(frozen().params, drafter, prompt, size, block, following, forced)


def test_an_unrolled_chain_says_what_the_served_chain_says():
    """Chains at the start of a segment, in the middle and near the end of a packed row."""
    drafter, packed = drafter_params(), random_rows()
    rows = device_rows(packed)
    starts = np.argmax(packed.segments == 2, axis=1)
    index = np.stack([np.full_like(starts, 5), starts + 1, starts + 3], axis=1).astype(np.int32)
    rng = np.random.default_rng(1)
    drafted = rng.integers(0, VOCAB, (*index.shape, NUM_DRAFTS)).astype(np.int32)
    trained = trained_logits(drafter, frozen().params, rows, index, drafted, None)
    for row in (0, 1):
        for chain, at in enumerate(index[row]):
            start = at - packed.positions[row, at]
            tokens = packed.token_ids[row, start : at + 1]
            expected = served(drafter, tokens, drafted[row, chain])
            scale = np.abs(expected).max()
            np.testing.assert_allclose(trained[row, chain], expected, rtol=0, atol=3e-5 * scale)


def test_features_at_or_after_the_anchor_change_nothing():
    drafter, rows = drafter_params(), device_rows(random_rows())
    num = rows.token_ids.shape[0]
    dense = jax.jit(build_dense_forward(TARGET, feature_layers=CONFIG.feature_layers))
    features = dense(frozen().params, rows).features
    index = jnp.tile(jnp.asarray([[4, 6, 7]], jnp.int32), (num, 1))
    drafted = jnp.ones((num, 3, NUM_DRAFTS), jnp.int32)

    def run(features):
        return trained_logits(drafter, frozen().params, rows, index, drafted, features)

    before = run(features)
    np.testing.assert_array_equal(before, run(features.at[:, 7:].set(100.0)))
    np.testing.assert_array_equal(before[:, 0], run(features.at[:, 4:].set(100.0))[:, 0])
    assert np.abs(before[:, 0] - run(features.at[:, 3].set(100.0))[:, 0]).max() > 1e-3


def test_the_loss_in_chunks_equals_the_loss_written_down():
    """Labels outside the drafter's vocabulary end a run and have no loss; gradients included."""
    rng = np.random.default_rng(2)
    shape = (2, 3, NUM_DRAFTS)
    hidden = jnp.asarray(rng.normal(size=(*shape, 32)), jnp.float32)
    teacher = jnp.asarray(rng.normal(size=(*shape, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(DRAFT_VOCAB, 32)), jnp.float32)
    tokens = rng.integers(0, VOCAB, shape)
    ids = np.asarray(frozen().target_ids)
    tokens[0, 0, :2] = ids[np.asarray(hidden[0, 0, :2] @ head.T).argmax(-1)]  # two right ones
    valid = rng.random(shape) < 0.8
    valid[0, 0] = True
    labels = Labels(jnp.asarray(tokens, jnp.int32), jnp.asarray(valid), jnp.zeros(shape, jnp.int32))
    spec = LossSpec(NUM_DRAFTS + 1, weighting="decay", gamma=4.48, soft_labels=0.7, chunk=4)

    def ours(hidden, head):
        return chain_loss(hidden, head, labels, teacher, frozen(), spec)

    def plain(hidden, head):
        log_probs = jax.nn.log_softmax(jnp.einsum("rake,ve->rakv", hidden, head))
        target_head = frozen().params.head[frozen().target_ids]
        wanted = jax.nn.softmax(jnp.einsum("rake,ve->rakv", teacher, target_head))
        known = np.isin(tokens, ids)
        number = np.searchsorted(ids, np.where(known, tokens, ids[0]))
        hard = jnp.take_along_axis(log_probs, jnp.asarray(number)[..., None], -1)[..., 0]
        weights = (valid & known) * np.exp(-np.arange(NUM_DRAFTS) / 4.48).astype(np.float32)
        return -(weights * (0.3 * hard + 0.7 * (wanted * log_probs).sum(-1))).sum()

    run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))
    (loss, (sums, lengths)), grads = run(hidden, head)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, expected_grads = jax.value_and_grad(plain, argnums=(0, 1))(hidden, head)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for grad, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, want, rtol=0, atol=1e-4)
    assert lengths[0, 0] >= 3
    assert sums.seen.tolist() == valid.sum((0, 1)).tolist()
    known = valid & np.isin(tokens, ids)
    weights = known * np.exp(-np.arange(NUM_DRAFTS) / 4.48)
    np.testing.assert_allclose(sums.norm, weights.sum(), rtol=1e-5)
