"""Calls an EAGLE drafter as the engine does, on rows of several requests, outside of an engine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.models.base import Block, Target
from tests.models.paging import block_at, page_tables

PAGE_SIZE = 4

# What the drafter borrows of a target: its params are (embedding [V, E], head [V, E]).
BORROWED = Target(
    embed=lambda params, token_ids: params[0][token_ids],
    forward=None,
    logits=lambda params, hidden: jnp.einsum("...e,ve->...v", hidden, params[1]),
    init_kv=None,
)


# What is tested is what is computed, not how fast; the compiler's own optimisations would take most
# of the tests' time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def programs(drafter: Drafter):
    """(draft, greedy, ingest) jitted.

    draft: (params, state, block, carry, forced i32[B, K]) -> (DraftBlock, logits, state), the
        chain of a sampled batch, led along the forced tokens.
    greedy: (params, state, block, carry) -> (DraftBlock, state).
    """

    def draft(params: ModelParams, state, block: Block, carry, forced):
        seen = []

        def sample(logits, positions):
            seen.append(logits)
            return jnp.take_along_axis(forced, positions - block.lens[:, None] - 1, axis=1)

        rows = jnp.ones_like(block.lens)
        context = DraftContext(rows, block, carry, sample)
        out, state = drafter.draft(params, state, context)
        return out, jnp.concatenate(seen, axis=1), state

    def greedy(params: ModelParams, state, block: Block, carry):
        rows = jnp.ones_like(block.lens)
        context = DraftContext(rows, block, carry, None, greedy=True)
        return drafter.draft(params, state, context)

    return quick_jit(draft), quick_jit(greedy), quick_jit(drafter.ingest)


def block_of(drafter: Drafter, bonus, lens, table) -> Block:
    """The block that the engine hands to `draft`."""
    ids = np.zeros((len(lens), drafter.block_size), np.int32)
    ids[:, 0] = bonus
    return block_at(ids, lens, table, PAGE_SIZE)


def batch_of(features, next_ids, lens, num_valid, table, *, rows=None) -> IngestBatch:
    """An `IngestBatch`: features [B, N, F * E], of which the first num_valid[b] are committed."""
    block = block_at(np.zeros(features.shape[:2]), lens, table, PAGE_SIZE)
    valid = np.arange(features.shape[1]) < np.asarray(num_valid)[:, None]
    locs = np.asarray(block.kv_locs)
    return IngestBatch(
        rows=jnp.asarray(range(1, len(lens) + 1) if rows is None else rows, jnp.int32),
        block=block.replace(kv_locs=jnp.asarray(np.where(valid, locs, locs % PAGE_SIZE))),
        next_ids=jnp.asarray(next_ids, jnp.int32),
        features=jnp.asarray(features, jnp.float32),
        num_valid=jnp.asarray(num_valid, jnp.int32),
        is_first=jnp.zeros(len(lens), bool),
    )


class Text:
    """What a request's tokens and features turn out to be, whatever the drafter thinks."""

    def __init__(self, seed: int, feature_width: int, length: int = 40):
        rng = np.random.default_rng(seed)
        self.features = rng.normal(size=(length, feature_width)).astype(np.float32)
        self.ids = rng.integers(0, 97, length)

    def committed(self, start: int, count: int, width: int):
        """Rows of an ingest: NaN features and id 0 where a draft was rejected."""
        features = np.full((width, self.features.shape[1]), np.nan, np.float32)
        features[:count] = self.features[start : start + count]
        next_ids = np.zeros(width, int)
        next_ids[:count] = self.ids[start + 1 : start + 1 + count]
        return features, next_ids

    def known(self, length: int):
        """The features of the first rows, and the tokens behind them."""
        return self.features[:length], self.ids[1 : length + 1]


class Run:
    """Three requests side by side in one drafter, whose KV starts as NaN."""

    def __init__(self, drafter: Drafter, params: ModelParams, feature_width: int):
        self.texts = [Text(seed, feature_width) for seed in range(3)]
        self.drafter, self.params = drafter, params
        self.table, self.lens = page_tables(3, 10), np.zeros(3, int)
        self.state = unwritten(drafter)
        _, self.greedy, self.ingest = programs(drafter)

    def commit(self, *counts: int) -> None:
        rows = zip(self.texts, self.lens, counts, strict=True)
        width = self.drafter.block_size
        parts = [text.committed(start, count, width) for text, start, count in rows]
        features, next_ids = (np.stack(part) for part in zip(*parts, strict=True))
        batch = batch_of(features, next_ids, self.lens, counts, self.table)
        self.state, self.carry = self.ingest(self.params, self.state, batch)
        self.lens = self.lens + np.array(counts)

    def draft(self) -> np.ndarray:
        """[3, K] the drafts behind what is committed."""
        bonus = [text.ids[n] for text, n in zip(self.texts, self.lens, strict=True)]
        block = block_of(self.drafter, bonus, self.lens, self.table)
        out, self.state = self.greedy(self.params, self.state, block, self.carry)
        np.testing.assert_array_equal(out.tokens[:, 0], bonus)
        return np.asarray(out.tokens[:, 1:])

    def from_scratch(self, row: int, dense):
        """What `dense` makes of a request: drafts and the outputs that they came from."""
        known = self.texts[row].known(self.lens[row])
        return dense.chain(*known, self.drafter.num_draft_tokens)


def unwritten(drafter: Drafter):
    """A state whose KV is NaN, so that a row read before it is written shows."""
    state = drafter.init_state(31, 3, 32)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.ndim == 5 else x, state)


def relative_error(got, expected) -> float:
    """Largest difference, relative to the largest value."""
    return np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()
