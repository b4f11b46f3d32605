"""The training graph against the serving path, and what a block may not see."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.kv_pages import to_null_page
from jaxspec.drafters.base import DraftContext, IngestBatch, ModelParams
from jaxspec.drafters.dflash import build_dflash
from jaxspec.models import Kernels, build_target
from jaxspec.models.layers import embed_tokens
from jaxspec.training.anchors import Anchors
from jaxspec.training.dflash import block_hidden, block_ids
from jaxspec.training.target import build_dense_forward
from tests.models.paging import block_at, page_tables
from tests.training.tiny import (
    DRAFTER,
    MASK,
    TARGET,
    device_rows,
    drafter_params,
    random_rows,
    target_params,
)

PAGE = 4
# One layer of each kind: full, and causal with a window.
CONFIG = dataclasses.replace(DRAFTER, layer_windows=(5, None), layer_causal=(True, False))


@cache
def trained_logits():
    """Jitted (target, drafter, rows, anchors, features or None) -> logits [R, A, K, V]."""
    dense = build_dense_forward(TARGET, feature_layers=CONFIG.target_layer_ids)

    def run(target, drafter, rows, anchors, features):
        if features is None:
            features = dense(target, rows).features
        embeddings = embed_tokens(target.embed, block_ids(rows, anchors, CONFIG))
        hidden = block_hidden(drafter, CONFIG, features, embeddings, rows, anchors, chunk=1 << 30)
        return jnp.einsum("rake,ve->rakv", hidden, target.head)

    return jax.jit(run)


@cache
def features_of():
    return jax.jit(build_dense_forward(TARGET, feature_layers=CONFIG.target_layer_ids))


@cache
def served_logits():
    """Jitted (target, drafter, prompt block, its length, drafted block) -> logits of slots 1..K.

    As the serving path makes them: prefill, ingest, draft.
    """
    model = build_target(
        TARGET,
        feature_layers=CONFIG.target_layer_ids,
        page_size=PAGE,
        dtype=jnp.dtype("float32"),
        kernels=Kernels(),
    )
    serving = build_dflash(
        CONFIG,
        model,
        block_size=CONFIG.block_size,
        page_size=PAGE,
        dtype=jnp.float32,
        kernels=Kernels(),
    )
    one = jnp.ones((1,), jnp.int32)

    def run(target, drafter, prompt, length, block):
        params = ModelParams(target, drafter)
        out = model.forward(target, model.init_kv(9), prompt)
        batch = IngestBatch(one, prompt, prompt.token_ids, out.features, length, one > 0)
        state, _ = serving.ingest(params, serving.init_state(9, 1, 32), batch)
        seen = []

        def sample(logits, positions):
            seen.append(logits)
            return jnp.argmax(logits, -1).astype(jnp.int32)

        serving.draft(params, state, DraftContext(one, block, (), sample))
        return seen[0][0]

    return jax.jit(run)


def served(target, drafter, tokens: np.ndarray, bonus: int):
    """Logits behind a prompt, padded to 16 tokens of which the rest go to the null page."""
    table, length = page_tables(1, 8), len(tokens)
    prompt = block_at(np.resize(np.append(tokens, 0), (1, 16)), [0], table, PAGE)
    valid = jnp.arange(16)[None] < length
    prompt = prompt.replace(kv_locs=to_null_page(prompt.kv_locs, valid, PAGE))
    ids = np.full((1, CONFIG.block_size), MASK)
    ids[:, 0] = bonus
    block = block_at(ids, [length], table, PAGE)
    length = jnp.asarray([length], jnp.int32)
    return served_logits()(target, drafter, prompt, length, block)


def test_a_trained_block_says_what_the_served_block_says():
    """Anchors at the start of a segment, in the middle and near the end of a packed row."""
    target, drafter, packed = target_params(), drafter_params(CONFIG), random_rows()
    rows = device_rows(packed)
    index = np.array([0, 5, 13, 20])
    anchors = jnp.asarray(np.tile(index, (len(packed), 1)), jnp.int32)
    anchors = Anchors(anchors, jnp.ones(anchors.shape, bool))
    trained = trained_logits()(target, drafter, rows, anchors, None)
    for row in (0, 1):
        for block, at in enumerate(index):
            start = at - packed.positions[row, at]
            tokens = packed.token_ids[row, start : at + 1]
            expected = served(target, drafter, tokens[:-1], tokens[-1])
            scale = np.abs(expected).max()
            np.testing.assert_allclose(trained[row, block], expected, rtol=0, atol=2e-5 * scale)


def test_dense_features_equal_the_served_targets():
    target, packed = target_params(), random_rows()
    dense = build_dense_forward(TARGET, feature_layers=(0, 1), with_hidden=True)
    out = jax.jit(dense)(target, device_rows(packed))
    model = build_target(
        TARGET, feature_layers=(0, 1), page_size=PAGE, dtype=jnp.dtype("float32"), kernels=Kernels()
    )
    forward = jax.jit(model.forward)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = packed.segments[row] == segment
        ids = np.resize(packed.token_ids[row, here], (1, 16))  # causal: what follows is not seen
        paged = forward(target, model.init_kv(9), block_at(ids, [0], page_tables(1, 8), PAGE))
        features, hidden = paged.features[0, : here.sum()], paged.hidden[0, : here.sum()]
        np.testing.assert_allclose(out.features[row, here], features, rtol=0, atol=3e-4)
        np.testing.assert_allclose(out.hidden[row, here], hidden, rtol=0, atol=3e-5)


def test_features_at_or_after_the_anchor_change_nothing():
    """The leak that made training look superb and serving accept nothing (SpecForge 455, 470)."""
    target, drafter = target_params(), drafter_params(CONFIG)
    rows = device_rows(random_rows())
    num = rows.token_ids.shape[0]
    features = features_of()(target, rows).features
    index = jnp.tile(jnp.asarray([[4, 6, 7]], jnp.int32), (num, 1))  # overlapping blocks
    anchors = Anchors(index, jnp.ones((num, 3), bool))
    run = trained_logits()
    before = run(target, drafter, rows, anchors, features)

    after_last = run(target, drafter, rows, anchors, features.at[:, 7:].set(100.0))
    np.testing.assert_array_equal(before, after_last)
    after_first = run(target, drafter, rows, anchors, features.at[:, 4:].set(100.0))
    np.testing.assert_array_equal(before[:, 0], after_first[:, 0])
    assert np.abs(before[:, 1:] - after_first[:, 1:]).max() > 1e-3
    last_seen = run(target, drafter, rows, anchors, features.at[:, 3].set(100.0))
    assert np.abs(before[:, 0] - last_seen[:, 0]).max() > 1e-3


def test_blocks_and_segments_do_not_see_each_other():
    target, drafter, packed = target_params(), drafter_params(CONFIG), random_rows()
    packed = packed.take(np.nonzero((packed.segments == 2).any(1))[0])
    rows = device_rows(packed)
    second = np.argmax(packed.segments == 2, axis=1).astype(np.int32)
    together = np.stack([second + 3, second + 4], axis=1)
    keep = jnp.ones(together.shape, bool)
    features = features_of()(target, rows).features
    run = trained_logits()
    both = run(target, drafter, rows, Anchors(jnp.asarray(together), keep), features)
    alone = run(target, drafter, rows, Anchors(jnp.asarray(together[:, 1:]), keep[:, 1:]), features)
    np.testing.assert_allclose(both[:, 1:], alone, rtol=0, atol=1e-5)
    first = jnp.asarray(packed.segments == 1)[..., None]
    changed = run(
        target,
        drafter,
        rows,
        Anchors(jnp.asarray(together), keep),
        jnp.where(first, 100.0, features),
    )
    np.testing.assert_array_equal(both, changed)
