"""EAGLE drafters inside the engine: the text is plain decoding's, the state as from scratch."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.metrics import acceptance_by_position
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.drafters.eagle import build_eagle
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.drafters.multi_layer_eagle import build_multi_layer_eagle
from jaxspec.drafters.multi_layer_eagle_config import MultiLayerEagleConfig
from jaxspec.drafters.multi_layer_eagle_params import MultiLayerEagleParams
from jaxspec.drafters.tree import TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.state import empty_prefill_batch, init_state
from jaxspec.engine.steps import build_steps
from jaxspec.mode import Mode
from jaxspec.models import build_target
from jaxspec.models.base import Block, Kernels, Target
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, TargetParams
from tests.drafters.dense_eagle import DenseEagle, DenseMultiLayer
from tests.drafters.eagle_rig import relative_error
from tests.fakes import EOS, VOCAB, build_table_target, checksum, make_table
from tests.harness import CONTEXT, PAGE, check, make_geometry, request, run, tokens_of
from tests.models.checkpoints import CONFIGS, load, target_params

BLOCK = 4
NUM_DRAFTS = BLOCK - 1
SIZES = dict(block_size=BLOCK, page_size=PAGE, dtype=jnp.dtype("float32"), kernels=Kernels())
GREEDY_AND_SAMPLED = [
    {},
    dict(temperature=0.9),
    dict(temperature=1.0, top_k=4),
    dict(temperature=0.7, top_p=0.8, min_p=0.02),
]


@pytest.fixture(autouse=True, scope="module")
def quick_compiling():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def engine_of(
    target: Target,
    drafter: Drafter,
    params: ModelParams,
    *,
    overlap: bool = True,
    families=(Mode.GREEDY, Mode.SAMPLED),
    caching: bool = False,
    **geometry,
) -> Engine:
    """families: which of the greedy and the sampled programs serve greedy and other batches."""
    geometry = make_geometry(block_size=drafter.block_size, **geometry)
    return Engine(
        geometry,
        params,
        init_state(geometry, target, drafter),
        {
            mode: build_steps(geometry, target, drafter, mode=family)
            for mode, family in zip((Mode.GREEDY, Mode.SAMPLED), families, strict=True)
        },
        eos_token_ids=(EOS,),
        overlap=overlap,
        prefix_lookahead=drafter.kv_lookahead if caching else None,
    )


def workload(settings, vocab: int = VOCAB):
    """More requests than slots; prompts of a token to more than a dispatch holds."""
    asked = []
    for i, length in enumerate([1, PAGE, 7, 21, PAGE + 1, 3, 13]):
        prompt = [(i * 5 + j * 3 + 1) % vocab for j in range(length)]
        params = {"seed": i, **settings[i % len(settings)]}
        limit = [None, 9, 14][i % 3]
        asked.append(request(f"r{i}", prompt, max_tokens=limit, ignore_eos=i % 2 > 0, **params))
    return asked


def random_eagle(config: EagleConfig, seed: int = 0, column_scales=1.0) -> EagleParams:
    """An EAGLE-3 drafter with a vocabulary of its own, everything random."""
    rng = np.random.default_rng(seed)
    width, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size

    def weight(*shape):
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

    def norm():
        return jnp.asarray(1 + 0.3 * rng.normal(size=width), jnp.float32)

    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    ids = np.sort(rng.permutation(vocab)[: config.draft_vocab_size])
    return EagleParams(
        layer=LayerParams(
            qkv=weight(heads, config.input_size),
            o=weight(width, config.num_heads * config.head_dim),
            gate_up=weight(2 * inner, width),
            down=weight(width, inner),
        ),
        post_norm=norm(),
        fc=weight(width, config.fc_size) * column_scales,
        input_norm=norm(),
        hidden_norm=norm(),
        norm=norm(),
        embed=weight(vocab, width),
        lm_head=weight(config.draft_vocab_size, width),
        target_ids=jnp.asarray(ids, jnp.int32),
    )


TABLE_EAGLE = EagleConfig(
    has_taps=True,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    draft_vocab_size=20,
    target_hidden_size=3,
    feature_layers=(0,),
)


@functools.cache
def table_eagle(tree: TreeShape | None = None) -> tuple[Drafter, EagleParams]:
    """Reads the toy target's features: token, position and checksum, of very unlike sizes."""
    drafter = build_eagle(TABLE_EAGLE, build_table_target(PAGE), **SIZES, tree=tree)
    scales = jnp.asarray([[0.1, 0.1, 1e-6]], jnp.float32)
    return drafter, random_eagle(TABLE_EAGLE, column_scales=scales)


def table_engine(tree: TreeShape | None = None, **options) -> Engine:
    drafter, own = table_eagle(tree)
    params = ModelParams(jnp.asarray(make_table()), own)
    return engine_of(build_table_target(PAGE), drafter, params, **options)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(
    "settings",
    [pytest.param([{}], marks=pytest.mark.nightly), GREEDY_AND_SAMPLED],
    ids=["greedy", "mixed"],
)
def test_the_text_is_that_of_plain_decoding(settings, overlap):
    """Exact, on the table target: slots reused, prompts in chunks, batches mixed."""
    asked = workload(settings)
    check(run(table_engine(overlap=overlap), *asked), *asked)


def test_a_step_keeps_shapes_and_dtypes_with_64_bit_types(x64):
    engine = table_engine()
    prefill = empty_prefill_batch(4, engine.geometry)
    decode = np.zeros((4, 1 + engine.geometry.pages_per_slot), np.int32)
    for step, packed in (
        (engine._programs.steps[Mode.GREEDY].prefill, prefill),
        (engine._programs.steps[Mode.SAMPLED].decode, decode),
    ):
        state, _ = jax.eval_shape(step, engine._programs.params, engine._programs.state, packed)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, engine._programs.state)


def check_relay(engine: Engine, asked, dense, features_of, num_drafts: int) -> int:
    """Steps to the end; after each step every row's carry equals recomputation from its text."""
    for each in asked:
        engine.add_request(each)
    checked = 0
    while engine.has_unfinished:
        engine.step()
        relay = jax.device_get(engine._programs.state.future_map)
        for slot, seq in engine._running.items():
            tokens = [*seq.request.prompt_token_ids, *seq.output_ids]
            assert relay.seq_lens[slot] == len(tokens) - 1
            drafts, outputs = dense.chain(features_of(tokens[:-1]), tokens[1:], num_drafts)
            hidden = relay.carry.hidden_states[slot].reshape(num_drafts, -1)
            assert relative_error(hidden, np.stack(outputs)) < 1e-4
            assert relay.carry.topk_index[slot].tolist() == drafts
            checked += 1
    return checked


def table_features(tokens):
    """What the toy target shows the drafter."""
    rows = [[t, p, 2 * checksum(tokens[: p + 1])] for p, t in enumerate(tokens)]
    return np.array(rows, np.float64)


def test_what_is_relayed_equals_recomputation_from_the_text():
    """Whatever was accepted, chunked or reused before: two drafts a step are forced to count."""
    engine = table_engine(overlap=False, force_accept=2)
    dense = DenseEagle(TABLE_EAGLE, table_eagle()[1])
    assert check_relay(engine, workload([{}]), dense, table_features, 1) > 15


def llama(feature_layers=()) -> tuple[Target, TargetParams]:
    target = build_target(
        CONFIGS["llama"],
        feature_layers=feature_layers,
        page_size=PAGE,
        dtype=jnp.dtype("float32"),
        kernels=Kernels(),
    )
    return target, target_params(load("llama"), CONFIGS["llama"])


@functools.cache
def last_logits():
    """(token ids i32[1, CONTEXT], count) -> f32[V] of the target behind the first `count`."""
    target, params = llama()
    locs = jnp.arange(PAGE, PAGE + CONTEXT, dtype=jnp.int32)[None]
    table = jnp.arange(1, 1 + CONTEXT // PAGE, dtype=jnp.int32)[None]
    kv = target.init_kv(1 + CONTEXT // PAGE)

    @jax.jit
    def run_all(token_ids, count):
        block = Block(token_ids, locs - PAGE, locs, table, jnp.zeros((1,), jnp.int32))
        return target.logits(params, target.forward(params, kv, block).hidden)[0, count - 1]

    return run_all


def logits_after(tokens: list[int]) -> np.ndarray:
    ids = np.zeros((1, CONTEXT), np.int32)
    ids[0, : len(tokens)] = tokens
    return np.asarray(last_logits()(ids, len(tokens)))


@pytest.mark.nightly
def test_a_float_model_says_the_same_but_for_near_ties():
    """Blocks of one and of several tokens round differently: 1e-3 of logits of about 10."""
    target, params = llama((0, 1, 2))
    config = dataclasses.replace(
        TABLE_EAGLE,
        hidden_size=32,
        vocab_size=97,
        draft_vocab_size=40,
        target_hidden_size=32,
        feature_layers=(0, 1, 2),
    )
    drafter = build_eagle(config, target, **SIZES)
    engine = engine_of(target, drafter, ModelParams(params, random_eagle(config)), vocab_size=97)
    asked = workload([{}], vocab=97)
    outputs = run(engine, *asked)
    for each in asked:
        tokens = list(each.prompt_token_ids)
        for token in tokens_of(outputs[each.request_id]):
            logits = logits_after(tokens)
            assert logits.max() - logits[token] < 1e-3
            tokens.append(token)
        most = min(each.params.max_tokens or CONTEXT, CONTEXT - len(each.prompt_token_ids))
        assert len(tokens) - len(each.prompt_token_ids) == most or tokens[-1] == EOS


WIDTH = 32
SUCCESSORS = (np.arange(VOCAB) + 5) % VOCAB
EMBED = np.random.default_rng(5).normal(size=(VOCAB, WIDTH))
EMBED /= np.sqrt((EMBED**2).mean(-1, keepdims=True))
HEAD = 0.1 * EMBED[np.argsort(SUCCESSORS)]
CHAIN = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def chain_target(feature_layer: int) -> tuple[Target, TargetParams]:
    """A Llama whose layer adds nothing: the next token depends on the last one alone."""
    target = build_target(
        CHAIN,
        feature_layers=(feature_layer,),
        page_size=PAGE,
        dtype=jnp.dtype("float32"),
        kernels=Kernels(),
    )
    params = TargetParams(
        embed=jnp.asarray(EMBED, jnp.float32),
        lm_head=jnp.asarray(HEAD, jnp.float32),
        final_norm=jnp.ones(WIDTH),
        input_norms=jnp.ones((1, WIDTH)),
        post_norms=jnp.ones((1, WIDTH)),
        q_norms=None,
        k_norms=None,
        layers=(idle_layer(WIDTH),),
    )
    return target, params


def idle_layer(inputs: int) -> LayerParams:
    return LayerParams(
        qkv=jnp.zeros((32, inputs)),
        o=jnp.zeros((WIDTH, 16)),
        gate_up=jnp.zeros((16, WIDTH)),
        down=jnp.zeros((WIDTH, 8)),
    )


def knowing_eagle(tree: TreeShape | None = None) -> tuple[Target, Drafter, ModelParams]:
    """EAGLE-1 whose output is the embedding of the token it read: it knows the target's logits."""
    target, params = chain_target(CHAIN.num_layers)
    config = dataclasses.replace(
        TABLE_EAGLE,
        has_taps=False,
        hidden_size=WIDTH,
        intermediate_size=8,
        draft_vocab_size=VOCAB,
        target_hidden_size=WIDTH,
        feature_layers=(CHAIN.num_layers,),
    )
    own = EagleParams(
        layer=idle_layer(WIDTH), post_norm=jnp.ones(WIDTH), fc=jnp.eye(WIDTH, 2 * WIDTH)
    )
    drafter = build_eagle(config, target, **SIZES, tree=tree)
    return target, drafter, ModelParams(params, own)


MULTI_LAYER = MultiLayerEagleConfig(
    num_layers=NUM_DRAFTS,
    is_chain=True,
    hidden_size=WIDTH,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    feature_layer=0,
)


def knowing_layers() -> MultiLayerEagleParams:
    """Outputs are near the embedding of the token read, so that the target's head goes on rightly.

    What attention and MLP add is little, and shows in the outputs; the last layer says the
    opposite of what it knows.
    """
    rng = np.random.default_rng(3)
    width, inner = MULTI_LAYER.hidden_size, MULTI_LAYER.intermediate_size
    heads = (MULTI_LAYER.num_heads + 2 * MULTI_LAYER.num_kv_heads) * MULTI_LAYER.head_dim

    def weight(*shape, scale=0.3):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    def layer() -> LayerParams:
        return LayerParams(
            qkv=weight(heads, width),
            o=weight(width, MULTI_LAYER.num_heads * MULTI_LAYER.head_dim, scale=0.03),
            gate_up=weight(2 * inner, width),
            down=weight(width, inner, scale=0.03),
        )

    ones = jnp.ones((NUM_DRAFTS, width))
    return MultiLayerEagleParams(
        embed_norms=ones,
        hidden_norms=ones,
        mixes=jnp.eye(width, 2 * width)[None] + weight(NUM_DRAFTS, width, 2 * width, scale=0.02),
        norms=ones.at[-1].set(-1.0),
        input_norms=ones,
        post_norms=ones,
        layers=tuple(layer() for _ in range(NUM_DRAFTS)),
    )


def multi_layer_engine(**options) -> Engine:
    target, params = chain_target(MULTI_LAYER.feature_layer)
    drafter = build_multi_layer_eagle(MULTI_LAYER, target, **SIZES)
    return engine_of(target, drafter, ModelParams(params, knowing_layers()), **options)


def successors(asked) -> list[int]:
    """The greedy text of the chain target."""
    token, out = asked.prompt_token_ids[-1], []
    for _ in range(min(asked.params.max_tokens or 99, 32 - len(asked.prompt_token_ids))):
        token = int(SUCCESSORS[token])
        out.append(token)
        if token == EOS and not asked.params.ignore_eos:
            break
    return out


@pytest.mark.nightly
def test_a_drafter_that_knows_the_target_is_always_right_at_any_temperature():
    """Drafts are drawn with the noise that the target draws with, at the same positions."""
    engine = engine_of(*knowing_eagle(), families=(Mode.SAMPLED, Mode.SAMPLED))
    asked = workload(GREEDY_AND_SAMPLED)
    outputs = run(engine, *asked)
    unlikely = []
    for each in asked:
        output = outputs[each.request_id]
        assert set(output.metrics.accept_lengths) <= {BLOCK}
        if tokens_of(output) != successors(each):
            unlikely.append(each.params.temperature)
    assert len(unlikely) >= 3 and 0.0 not in unlikely
    assert engine.stats.num_accepted == NUM_DRAFTS * engine.stats.num_verifies > 0


@pytest.mark.nightly
def test_acceptance_by_position_shows_the_layer_that_is_wrong():
    """F31: the first two of three layers are right, the third never is."""
    engine, asked = multi_layer_engine(), workload([{}])
    outputs = run(engine, *asked)
    for each in asked:
        assert tokens_of(outputs[each.request_id]) == successors(each)
    counts = dict(enumerate(engine.stats.accept_lengths))
    assert acceptance_by_position(counts, NUM_DRAFTS) == (1.0, 1.0, 0.0)


def test_the_relay_of_several_layers_equals_recomputation_from_the_text():
    """Tiles, chunks and reused slots of the engine, two drafts accepted a step."""
    dense = DenseMultiLayer(MULTI_LAYER, knowing_layers(), EMBED, HEAD)
    engine = multi_layer_engine(overlap=False)
    checked = check_relay(engine, workload([{}]), dense, lambda tokens: EMBED[tokens], NUM_DRAFTS)
    assert checked > 15


@pytest.mark.parametrize("layers", [False, True], ids=["eagle3", "several layers"])
def test_the_relay_behind_cached_pages_equals_recomputation_from_the_text(layers):
    """F10: rows that depend on tokens behind them are those of this text, not of the cached one.

    All in one slot. The third prompt finds two pages of the first and goes on otherwise; the second
    ends just there, so that what the slot keeps of its last rows would fit the third's, and would
    be written into pages that are the first's too.
    """
    if layers:
        dense = DenseMultiLayer(MULTI_LAYER, knowing_layers(), EMBED, HEAD)
        engine = multi_layer_engine(overlap=False, caching=True)
        features_of, num_drafts = (lambda tokens: EMBED[tokens]), NUM_DRAFTS
    else:
        dense = DenseEagle(TABLE_EAGLE, table_eagle()[1])
        engine = table_engine(overlap=False, force_accept=2, caching=True)
        features_of, num_drafts = table_features, 1
    engine._free_slots.clear()
    engine._free_slots.append(1)
    engine.check_idle = lambda: None  # two slots are kept away on purpose
    first = [(i * 7 + 3) % 32 for i in range(16)]
    prompts = [first, [(i * 5) % 32 for i in range(8)], [*first[:11], 30, 31], first]
    cached = []
    for i, prompt in enumerate(prompts):
        asked = request(f"r{i}", prompt, max_tokens=(9, 1, 9, 9)[i], ignore_eos=True)
        engine.add_request(asked)
        engine._admit()
        engine._dispatch_prefill()
        (seq,) = engine._running.values()
        cached.append(seq.num_cached)
        assert check_relay(engine, [], dense, features_of, num_drafts) >= (i != 1)
    assert cached == [0, 0, 8, 12]
