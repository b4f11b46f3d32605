"""Prompt lookup against a search in plain Python, and its history across steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.kv_pages import to_null_page
from jaxspec.config import EngineConfig, Kernels
from jaxspec.drafters.base import DraftContext, DrafterSetup, IngestBatch, ModelParams
from jaxspec.drafters.ngram import DEFAULT_BLOCK_SIZE, History, build_ngram, plan_ngram
from jaxspec.future_map import token_dtype
from tests.fakes import NUM_STATES, VOCAB
from tests.harness import make_engine, request, run, tokens_of
from tests.models.paging import block_at, page_tables

K, NGRAM, MAX_LEN = 4, 3, 24
PAGE = 4
WIDTH = -(-(MAX_LEN + K + 1) // PAGE)  # pages of a row
DRAFTER = build_ngram(num_draft_tokens=K, ngram_max=NGRAM, page_size=PAGE)
PARAMS = ModelParams((), ())


def block_of(tokens, lens, table):
    return block_at(tokens, lens, table, PAGE).replace(token_ids=jnp.asarray(tokens, token_dtype()))


@jax.jit
def _draft(state, rows, block):
    return DRAFTER.draft(PARAMS, state, DraftContext(rows, block, (), None))[0]


@jax.jit
def _ingest(state, rows, block, num_valid):
    batch = IngestBatch(rows, block, block.token_ids, jnp.zeros(0), num_valid, rows < 0)
    return DRAFTER.ingest(PARAMS, state, batch)[0]


def draft(*histories, stale=9):
    """Drafts for rows whose last token is the bonus token; [(drafts, count)]."""
    table = np.pad(page_tables(len(histories), WIDTH), ((1, 0), (0, 0)))
    tokens = np.full((1 + table.max(), PAGE), stale)
    for row, history in enumerate(histories, start=1):
        for position, token in enumerate(history[:-1]):
            tokens[table[row, position // PAGE], position % PAGE] = token
    state = History(jnp.asarray(tokens, token_dtype()))
    rows = jnp.arange(len(histories) + 1, dtype=jnp.int32)
    bonus = [[0], *[[history[-1]] for history in histories]]
    lens = [1, *[len(history) - 1 for history in histories]]
    block = block_of(np.pad(bonus, ((0, 0), (0, K))), lens, table)
    result = _draft(state, rows, block)
    chex.assert_shape(result.tokens, (len(rows), K + 1))
    chex.assert_type(result.tokens, token_dtype())
    chex.assert_type(result.num_draft_tokens, jnp.int32)
    assert result.tokens[1:, 0].tolist() == [history[-1] for history in histories]
    counts = result.num_draft_tokens.tolist()
    drafts = result.tokens[:, 1:].tolist()
    return list(zip(drafts, counts, strict=True))[1:]


def reference(history):
    """What follows the last occurrence of the longest latest n-gram, repeating itself."""
    end = len(history) - 1
    for size in range(NGRAM, 0, -1):
        latest = history[len(history) - size :]
        for last in range(end - 1, size - 2, -1):
            if len(latest) == size and history[last - size + 1 : last + 1] == latest:
                known = list(history)
                for _ in range(K):
                    known.append(known[len(known) - (end - last)])
                return known[len(history) :], K
    return None, 0


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([5, 6, 7, 8, 1, 2, 5, 6, 7], [8, 1, 2, 5]),
        ([1, 2, 3, 1], [2, 3, 1, 2]),
        ([4, 4], [4, 4, 4, 4]),
        ([7, 1, 7, 2, 7], [2, 7, 2, 7]),
        # The longest match wins over the latest.
        ([1, 2, 3, 8, 8, 0, 3, 5, 0, 1, 2, 3], [8, 8, 0, 3]),
    ],
    ids=str,
)
def test_drafts_follow_the_last_occurrence_of_the_longest_match(history, drafts, x64):
    assert draft(history) == [(drafts, K)]


@pytest.mark.parametrize("history", [[3], [1, 2, 3, 4]], ids=str)
def test_without_a_match_nothing_is_meant(history):
    ((_, count),) = draft(history)
    assert count == 0


def test_the_last_owners_tokens_never_match():
    """F5: the row is full of the bonus token, all of it past the request's own length."""
    ((_, count),) = draft([3, 9], stale=9)
    assert count == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LEN - 1), min_size=3, max_size=3),
    st.integers(0, 3),
)
def test_random_histories_draft_as_a_plain_search_does(histories, stale):
    for history, (drafts, count) in zip(histories, draft(*histories, stale=stale), strict=True):
        wanted, wanted_count = reference(history)
        assert count == wanted_count
        if count:
            assert drafts == wanted


def test_only_committed_tokens_enter_the_history():
    """Each beside its KV: rejected drafts and padding go to the null page with theirs."""
    state = DRAFTER.init_state(9, 3, MAX_LEN)
    chex.assert_shape(state.tokens, (9, PAGE))
    chex.assert_type(state.tokens, token_dtype())
    rows = jnp.asarray([2, 0, 3], jnp.int32)
    table = np.array([[5, 6], [0, 0], [7, 2]], np.int32)
    block = block_of([[11, 12, 13], [1, 1, 1], [21, 22, 23]], [3, 1, 5], table)
    num_valid = jnp.asarray([2, 0, 2], jnp.int32)
    committed = jnp.arange(3)[None] < num_valid[:, None]
    block = block.replace(kv_locs=to_null_page(block.kv_locs, committed, PAGE))
    state = _ingest(state, rows, block, num_valid)
    expected = np.zeros((9, PAGE), int)
    expected[5, 3], expected[6, 0] = 11, 12
    expected[2, 1:3] = [21, 22]
    assert state.tokens[1:].tolist() == expected[1:].tolist()


def test_a_repeating_text_is_drafted_in_full():
    """A target that says 5 for ever: nothing to look up at first, then whole blocks."""
    engine = make_engine("ngram")
    engine._programs.params = engine._programs.params.replace(
        target=jnp.zeros((NUM_STATES, VOCAB)).at[:, 5].set(1)
    )
    output = run(engine, request("a", [1, 2], max_tokens=18))["a"]
    assert tokens_of(output) == [5] * 18
    assert output.metrics.accept_lengths == [1, 8, 8]


@pytest.mark.parametrize(("block_size", "wanted"), [(None, DEFAULT_BLOCK_SIZE), (5, 5)])
def test_the_plan_takes_block_size_and_longest_ngram_from_the_settings(block_size, wanted):
    config = EngineConfig(drafter="ngram", block_size=block_size, ngram_max=2)
    plan = plan_ngram(DrafterSetup(config, None, "float32", None))
    assert (plan.block_size, plan.params, plan.feature_layers) == (wanted, (), ())
    drafter = plan.build(None, 4, Kernels())
    assert drafter is build_ngram(num_draft_tokens=wanted - 1, ngram_max=2, page_size=4)
    assert drafter.block_size == wanted
