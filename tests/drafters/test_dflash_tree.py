"""DFlash with a tree over its marginals: which tree, and inside the engine."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Kernels
from jaxspec.drafters.base import DraftContext, Drafter, ModelParams
from jaxspec.drafters.dflash import build_dflash, project_context
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.drafters.tree import TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import init_state
from jaxspec.engine.steps import build_steps
from jaxspec.future_map import token_dtype
from jaxspec.mode import Mode
from jaxspec.models.base import Target, TargetOutput
from jaxspec.models.layers import LayerParams
from tests.drafters.test_tree import best_paths, paths_of
from tests.fakes import EOS, VOCAB, build_table_target, checksum, make_table
from tests.harness import CONTEXT, PAGE, check, make_geometry, request, run
from tests.models.paging import block_at, page_tables, rows_of

WIDTH, BLOCK = 16, 4
TREE = TreeShape(num_nodes=14, width=6, depth=BLOCK - 1)
CONFIG = DFlashConfig(
    num_layers=2,
    hidden_size=WIDTH,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    block_size=BLOCK,
    mask_token_id=5,
    target_layer_ids=(0,),
    layer_windows=(None, None),
    layer_causal=(False, False),
    max_position_embeddings=64,
    vocab_size=VOCAB,
    target_hidden_size=3,
)


@pytest.fixture(autouse=True, scope="module")
def quick_compiling():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def wide_table_target() -> Target:
    """The toy target with an embedding and a head that a drafter can borrow.

    Its params are (table, embedding [V, E], head [V, E]).
    """
    toy = build_table_target(PAGE)

    def logits(params, hidden: jax.Array) -> jax.Array:
        if hidden.shape[-1] == 1:
            return toy.logits(params[0], hidden)
        return jnp.einsum("bne,ve->bnv", hidden, params[2])

    def forward(params, kv, block) -> TargetOutput:
        return toy.forward(params[0], kv, block)

    return Target(lambda params, ids: params[1][ids], forward, logits, toy.init_kv)


def random_params() -> ModelParams:
    rng = np.random.default_rng(0)

    def weight(*shape, scale=0.3):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    def layer() -> LayerParams:
        return LayerParams(
            qkv=weight(32, WIDTH),
            o=weight(WIDTH, 16),
            gate_up=weight(32, WIDTH),
            down=weight(WIDTH, 16),
        )

    layers = CONFIG.num_layers
    own = DFlashParams(
        # Token, position and checksum are of very unlike sizes.
        fc=weight(WIDTH, 3) * jnp.asarray([[0.1, 0.1, 1e-6]]),
        hidden_norm=jnp.ones(WIDTH),
        norm=jnp.ones(WIDTH),
        input_norms=jnp.ones((layers, WIDTH)),
        post_norms=jnp.ones((layers, WIDTH)),
        q_norms=jnp.ones((layers, 8)),
        k_norms=jnp.ones((layers, 8)),
        layers=tuple(layer() for _ in range(layers)),
    )
    target = (jnp.asarray(make_table()), weight(VOCAB, WIDTH, scale=1), weight(VOCAB, WIDTH))
    return ModelParams(target, own)


@functools.cache
def build(tree: TreeShape | None = TREE, **changes) -> Drafter:
    return build_dflash(
        dataclasses.replace(CONFIG, **changes),
        wide_table_target(),
        block_size=BLOCK,
        page_size=PAGE,
        dtype=jnp.dtype("float32"),
        kernels=Kernels(),
        tree=tree,
    )


@functools.lru_cache
def params() -> ModelParams:
    return random_params()


def drafts_of(drafter: Drafter, lens=(5, 9)):
    """Greedy drafts of two requests without context, and the logits that they came from."""

    def draft(params, state, block):
        seen = []

        def scores(logits, positions):
            seen.append(logits)
            return logits

        def sample(logits, positions):
            return scores(logits, positions).argmax(-1).astype(token_dtype())

        context = DraftContext(jnp.ones_like(block.lens), block, (), sample, True, scores)
        return drafter.draft(params, state, context)[0], seen[0]

    ids = np.full((2, drafter.block_size), CONFIG.mask_token_id)
    ids[:, 0] = [7, 8]
    block = block_at(ids, list(lens), page_tables(2, 8), PAGE)
    return jax.jit(draft)(params(), drafter.init_state(17, 2, 32), block)


def test_the_tree_holds_the_likeliest_paths_through_the_block():
    """Independent positions: a path's probability is the product of its tokens' (DDTree)."""
    out, logits = drafts_of(build())
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    for row, bonus in enumerate([7, 8]):

        def children(path, row=row):
            depth = len(path) - 1
            if depth == BLOCK - 1:
                return ()
            best = np.argsort(-log_probs[row, depth])[: TREE.width]
            return zip(log_probs[row, depth, best], best, strict=True)

        assert set(paths_of(out, row)) == best_paths(children, TREE.num_nodes, bonus)
    assert out.num_draft_tokens.tolist() == [TREE.num_nodes - 1] * 2


def test_a_tree_of_one_branch_is_the_chain():
    tree, _ = drafts_of(build(TreeShape(BLOCK, 1, BLOCK - 1)))
    chain, _ = drafts_of(build(None))
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2


@pytest.mark.nightly
def test_a_row_whose_block_runs_past_the_drafters_positions_drafts_nothing():
    out, _ = drafts_of(build(max_position_embeddings=12))
    assert out.num_draft_tokens.tolist() == [TREE.num_nodes - 1, 0]


def engine_of(drafter: Drafter, **options) -> Engine:
    target = wide_table_target()
    overlap = options.pop("overlap", True)
    geometry = make_geometry(block_size=drafter.block_size, **options)
    return Engine(
        geometry,
        params(),
        init_state(geometry, target, drafter),
        {mode: build_steps(geometry, target, drafter, mode=mode) for mode in Mode},
        eos_token_ids=(EOS,),
        overlap=overlap,
    )


def workload(settings):
    asked = []
    for i, length in enumerate([1, PAGE, 7, 21, PAGE + 1, 3]):
        prompt = [(i * 5 + j * 3 + 1) % VOCAB for j in range(length)]
        wanted = {"seed": i, **settings[i % len(settings)]}
        asked.append(request(f"r{i}", prompt, max_tokens=14, ignore_eos=i % 2 > 0, **wanted))
    return asked


SETTINGS = [{}, dict(temperature=0.9), dict(temperature=1.0, top_k=4)]


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [pytest.param([{}], False, marks=pytest.mark.nightly), (SETTINGS, True)],
    ids=["greedy", "mixed, overlapped"],
)
def test_the_text_is_that_of_plain_decoding(settings, overlap):
    asked = workload(settings)
    engine = engine_of(build(), overlap=overlap)
    check(run(engine, *asked), *asked)
    assert engine.stats.num_accepted > 0, "not one draft was right, so no path was followed"


@pytest.mark.nightly
def test_a_tree_emits_no_fewer_tokens_a_step_than_the_chain():
    """Of as many positions, the chain is one of the tree's paths."""
    asked = workload([{}])
    lengths = {}
    for tree in (None, TREE):
        outputs = run(engine_of(build(tree)), *asked)
        check(outputs, *asked)
        lengths[tree] = [outputs[each.request_id].metrics.num_verifies for each in asked]
    assert all(a <= b for a, b in zip(lengths[TREE], lengths[None], strict=True))
    assert sum(lengths[TREE]) < sum(lengths[None])


@pytest.mark.nightly
def test_the_drafters_rows_are_those_of_the_text():
    """Two drafts a step are forced to count; then the KV of all layers is made again."""
    engine = engine_of(build(), overlap=False, force_accept=2)
    for each in workload([{}])[:3]:
        engine.add_request(each)
    project, checked = jax.jit(project_context, static_argnums=2), 0
    while engine.has_unfinished:
        engine.step()
        for slot, seq in engine._running.items():
            tokens = [*seq.request.prompt_token_ids, *seq.output_ids][:-1]
            features = np.zeros((1, CONTEXT, 3), np.float32)
            features[0, : len(tokens)] = [
                [t, p, 2 * checksum(tokens[: p + 1])] for p, t in enumerate(tokens)
            ]
            context = np.asarray(project(params().drafter, features, CONFIG))[0, : len(tokens)]
            for layer, pages in enumerate(engine._programs.state.drafter_state):
                table = engine._pages.table[slot]
                values = rows_of(pages, table, len(tokens))[1]
                np.testing.assert_allclose(
                    values.transpose(1, 0, 2), context[:, layer, 1], rtol=0, atol=1e-5
                )
            checked += 1
    assert checked > 5
    assert engine.stats.num_accepted == 2 * engine.stats.num_verifies > 0
