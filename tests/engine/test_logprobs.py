"""Log-probabilities come from the verify pass and equal those of plain decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.compilations import count_compilations
from jaxspec.cache.page_pool import PagePool
from jaxspec.engine.warmup import warmup
from jaxspec.logprobs import pack_logprobs, top_tokens
from jaxspec.mode import Mode
from tests.fakes import PieceDetokenizer, letters
from tests.harness import (
    SCRIPT,
    check,
    check_logprobs,
    drain,
    make_engine,
    record,
    request,
    run,
    tokens_of,
)
from tests.told import told_engine

ASKED = [
    dict(logprobs=2),
    dict(),
    dict(logprobs=0, temperature=0.8, seed=3),
    dict(prompt_logprobs=1),
    dict(logprobs=20, prompt_logprobs=0, frequency_penalty=0.5),
    dict(frequency_penalty=0.5),
    dict(logprobs=1, temperature=1.1, top_k=3, seed=1),
]


def workload():
    asked = []
    for i, params in enumerate(ASKED):
        prompt = [i + 1, *((i * 5 + j * 3) % 32 for j in range((3, 0, 7, 19, 18)[i % 5]))]
        asked.append(request(f"r{i}", prompt, max_tokens=11, ignore_eos=True, **params))
    return asked


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("accepts", [0, 7, SCRIPT], ids=str)
def test_every_mix_tells_what_plain_decoding_tells(accepts, overlap):
    asked = workload()
    outputs = run(told_engine(*asked, accepts=accepts, overlap=overlap), *asked)
    check(outputs, *asked)
    for each in asked:
        check_logprobs(outputs[each.request_id], each)


def test_preemption_and_cached_prompts_lose_no_entry():
    asked = [
        request(f"r{i}", [i + 1, 5, 9, 2, 2, 8], max_tokens=None, ignore_eos=True, **params)
        for i, params in enumerate([dict(logprobs=1), dict(prompt_logprobs=2), dict(logprobs=3)])
    ]
    engine = told_engine(*asked, accepts=2)
    engine._use_pool(PagePool(16))
    outputs = run(engine, *asked)
    assert engine.stats.num_preemptions >= 1
    for each in asked:
        check_logprobs(outputs[each.request_id], each)
        run(engine, each)
        again = run(engine, each)[each.request_id]
        assert (again.num_cached_tokens > 0) == (each.params.prompt_logprobs is None)
        check_logprobs(again, each)


def test_entries_end_with_the_text_that_a_stop_string_cuts():
    """Also the tokens' texts are told."""
    asked = request("a", [3, 1, 4], max_tokens=20, ignore_eos=True, logprobs=1)
    engine = told_engine(asked, accepts=7, make_detokenizer=lambda _: PieceDetokenizer(letters()))
    text = run(engine, asked)["a"].outputs[0].text
    stopped = request("a", [3, 1, 4], max_tokens=20, ignore_eos=True, logprobs=1, stop=text[4:6])
    output = run(engine, stopped)["a"]
    entries = output.outputs[0].logprobs
    assert len(entries) == len(tokens_of(output)) == 6
    shown = [entry[token] for entry, token in zip(entries, tokens_of(output), strict=True)]
    assert "".join(each.decoded_token for each in shown) == text[:6]


def test_only_batches_that_are_asked_run_the_programs_of_logprobs():
    plain = request("p", [1, 2], max_tokens=2)
    prompt = request("q", [2] * 5, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    told = request("l", [3, 2], max_tokens=9, ignore_eos=True, logprobs=0)
    engine = told_engine(plain, prompt, told)
    calls = record(engine)
    run(engine, plain)
    assert {call.mode for call in calls} == {Mode.GREEDY}
    calls.clear()
    run(engine, prompt)
    assert {(call.kind, call.mode) for call in calls} == {
        ("prefill", Mode.PROMPT_LOGPROBS),
        ("decode", Mode.GREEDY),
    }
    calls.clear()
    run(engine, told)
    assert {call.mode for call in calls} == {Mode.LOGPROBS}


@pytest.mark.nightly
@pytest.mark.parametrize("options", [dict(drafter="tree"), dict(decode_steps=3)], ids=str)
def test_logprobs_of_trees_and_of_loops(options):
    asked = workload()
    outputs = run(make_engine(**options), *asked)
    check(outputs, *asked)
    for each in asked:
        check_logprobs(outputs[each.request_id], each)


@pytest.mark.parametrize("vocab_size", [20, 128 * 20, 128 * 21 - 5, 128 * 37 + 1])
def test_the_likeliest_tokens_are_those_of_a_sort(vocab_size):
    """Also among equals, of which the lower id comes first, and with forbidden tokens."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-40, 40, (2, 3, vocab_size)).astype(np.float32) / 8
    logits[1, 0, ::3] = -np.inf
    top, ids = jax.jit(top_tokens, static_argnums=1)(jnp.asarray(logits), 20)
    want = np.argsort(-logits, axis=-1, kind="stable")[..., :20]
    assert ids.tolist() == want.tolist()
    assert top.tolist() == np.take_along_axis(logits, want, -1).tolist()


def test_no_sort_of_the_vocabulary():
    """The widest sort is of 20 chunks of 128."""
    jaxpr = jax.make_jaxpr(pack_logprobs)(
        jnp.zeros((1, 2, 49152), jnp.float32), jnp.zeros((1, 2), jnp.int32)
    )
    widths = [
        eqn.invars[0].aval.shape[-1]
        for eqn in jaxpr.jaxpr.eqns
        if eqn.primitive.name in ("sort", "top_k")
    ]
    assert sorted(widths) == [384, 20 * 128]


def test_a_mode_that_was_not_warmed_up_says_so_once(caplog):
    plain = request("p", [1, 2], max_tokens=3)
    told = request("l", [3, 2], max_tokens=3, logprobs=0)
    engine = told_engine(plain, told)
    warmup(engine, modes=[Mode.GREEDY])
    for _ in range(2):
        run(engine, plain, told)
    lines = [record.message for record in caplog.records]
    assert lines == ["compiling for logprobs while requests wait; name it in warm_up"]


def test_nothing_compiles_after_the_warm_up_of_every_mode():
    """F27: logprobs and penalties on and off, in any mix, with the first abort among them."""
    asked = workload()
    engine = told_engine(*asked)
    warmup(engine, modes=tuple(Mode))
    with count_compilations() as count:
        for each in asked:
            engine.add_request(each)
        engine.step()
        engine.abort("r2")
        drain(engine)
        outputs = run(engine, *asked)
    assert count.count == 0
    check(outputs, *asked)
