"""`LLM` as a Python program uses it: order, streams, aborts, and what it refuses."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import SamplingParams
from jaxspec.bench.compilations import count_compilations
from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.config import ConfigError
from jaxspec.llm import LLM, default_cache_dir
from jaxspec.request import FinishReason, RequestError
from tests.tiny_model import BROKEN, EOS, SIZES, SPECIAL, write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_llm(folder, tmp_path_factory):
    return LLM(
        str(folder),
        drafter="ngram",
        block_size=4,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        lazy=True,
        compilation_cache=False,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture
def llm(shared_llm):
    """The shared model, which every test leaves as it found it."""
    yield shared_llm
    assert_idle(shared_llm)


def assert_idle(llm):
    """Nothing runs or waits, once the step that was dispatched last has landed."""
    if llm.engine.has_unfinished:
        llm.engine.step()
    assert not llm.engine.has_unfinished
    llm.engine.check_idle()
    assert llm._inbox.is_empty


def text_of(output):
    return output.outputs[0].text


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["a long prompt of some words", "b", "cc", "a", "ddd"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3, 2)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 3, 2]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 5
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    assert [text_of(output) for output in alone] == [text_of(output) for output in outputs]


def test_a_prompt_is_text_or_token_ids_in_any_form(llm):
    ids = llm.get_tokenizer().encode("hello")
    forms = [
        "hello",
        ["hello"],
        ids,
        [ids],
        (tuple(ids),),
        np.array(ids),
        [np.array(ids, np.int64)],
        list(np.array(ids)),
        list(jax.numpy.array(ids)),
        {"prompt": "hello", "prompt_token_ids": None},
        [{"prompt_token_ids": ids}],
    ]
    results = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert [len(result) for result in results] == [1] * len(forms)
    assert {text_of(result[0]) for result in results} == {text_of(results[0][0])}
    assert all(result[0].prompt_token_ids == tuple(ids) for result in results)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


def test_without_parameters_the_defaults_hold(llm):
    stream = llm.stream("hello")
    assert llm.engine._by_id[stream.request_id].request.params == SamplingParams()
    stream.close()


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["good", ""], None, "the prompt is empty; it needs at least one token"),
        (["good", [1, 9999]], None, "token id 9999 is outside the vocabulary; ids are 0 to 257"),
        (["good", [1, 1.0]], None, "token id 1.0 is not a whole number"),
        (["good", "x" * 128], None, "the prompt has 128 tokens, but max_model_len is 128"),
        ([["good"]], None, "token id 'good' is not a whole number"),
        (["good", b"bytes"], None, "a prompt is of type bytes; give text or a list of token ids"),
        ([3.5], None, "a prompt is of type float; give text or a list of token ids"),
        (np.array(3), None, "prompts are of type ndarray; give text, a list of token ids, or a"),
        (["good", bytearray(b"x")], None, "a prompt is of type bytearray; give text or a list"),
        ({"prompt_token_ids": "abc"}, None, "'prompt_token_ids' of a prompt is of type str; give"),
        ({"prompt": [1, 2]}, None, "'prompt' of a prompt is of type list; give text"),
        ({"prompt": None}, None, r"a prompt has the keys \['prompt'\]; give it 'prompt' or"),
        ({"text": "good"}, None, r"a prompt has the keys \['text'\]; give it 'prompt' or"),
        (["good", "\udcff"], None, "the text is not valid UTF-8 at character 0"),
        (["a", "b"], [GREEDY], "there are 1 sampling_params for 2 prompts; give one for all"),
        ("a", {"temperature": 0}, "sampling_params is of type dict; give a SamplingParams"),
        ("a", [{"temperature": 0}], "sampling_params is of type list; give a SamplingParams"),
    ],
    ids=lambda value: None if isinstance(value, (list, dict)) else str(value)[:24],
)
def test_a_prompt_that_cannot_be_served_refuses_the_call_before_anything_runs(
    llm, prompts, params, message
):
    before = llm.engine.stats.num_prefill_steps
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished
    assert llm.engine.stats.num_prefill_steps == before


def test_chat_writes_the_conversation_as_the_template_says(llm):
    (output,) = llm.chat(HELLO, GREEDY, use_tqdm=False)
    start, end = SPECIAL
    assert output.prompt == f"{start}user\nhello{end}\n{start}assistant\n"
    assert text_of(output) == text_of(llm.generate(output.prompt, GREEDY, use_tqdm=False)[0])


def test_chat_hands_options_to_the_template(llm):
    (output,) = llm.chat(
        HELLO,
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        enable_thinking=False,
        chat_template_kwargs={"style": "brief"},
    )
    assert output.prompt.endswith("<|im_end|>\n[thinking False][brief]")


def test_chat_answers_several_conversations_in_order(llm):
    other = [{"role": "system", "content": "be kind"}, *HELLO]
    outputs = llm.chat([other, HELLO], [GREEDY, GREEDY], use_tqdm=False)
    assert ["be kind" in output.prompt for output in outputs] == [True, False]


def test_the_next_turn_of_a_chat_finds_the_turns_before_it(llm):
    turns = [{"role": "user", "content": "tell me something that is long enough"}]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answer = llm.chat(turns, params, use_tqdm=False)[0]
    turns += [
        {"role": "assistant", "content": text_of(answer)},
        {"role": "user", "content": "go on"},
    ]
    second = llm.chat(turns, params, use_tqdm=False)[0]
    known = len(answer.prompt_token_ids)
    page = llm.assembled.geometry.page_size
    assert second.num_cached_tokens >= known // page * page > 0
    assert second.num_cached_tokens < len(second.prompt_token_ids)


def test_a_chat_can_be_streamed(llm):
    (whole,) = llm.chat(HELLO, GREEDY, use_tqdm=False, enable_thinking=True)
    deltas = list(llm.stream_chat(HELLO, GREEDY, enable_thinking=True))
    assert deltas[-1].output.prompt == whole.prompt
    assert "".join(delta.text for delta in deltas) == text_of(whole)


def test_token_ids_come_without_text_where_nobody_wants_it(llm):
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    (bare,) = llm.generate("hello", replace(GREEDY, detokenize=False), use_tqdm=False)
    assert bare.outputs[0].token_ids == whole.outputs[0].token_ids
    assert (text_of(bare), bool(text_of(whole))) == ("", True)


def test_an_unknown_role_is_refused(llm):
    with pytest.raises(RequestError, match=r"^message 0 has the role 'usr'; it must be one of"):
        llm.chat([{"role": "usr", "content": "hello"}])


@pytest.mark.parametrize("messages", [[], ["hello"], [[]], HELLO[0], [HELLO[0], "x"]], ids=repr)
def test_chat_refuses_what_is_no_conversation(llm, messages):
    with pytest.raises(RequestError, match="give a list of"):
        llm.chat(messages)


def test_a_stream_adds_up_to_the_result_of_generate(llm):
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("hello", GREEDY))
    assert "".join(delta.text for delta in deltas) == text_of(whole)
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    last = deltas[-1].output
    assert last.outputs[0].finish_reason == "length"
    assert last.metrics.num_committed == 7
    assert last.metrics.time_to_first_token_s > 0
    assert last.metrics.mean_accept_length >= 1


def test_a_stream_refuses_a_bad_prompt_at_once(llm):
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream("")


def test_leaving_a_stream_early_aborts_the_request(llm):
    with llm.stream("hello", SamplingParams(temperature=0, max_tokens=100)) as stream:
        next(stream)
    assert list(stream) == []
    assert stream.output.finished is False
    assert_idle(llm)


def test_a_stream_that_is_closed_before_its_first_delta_never_runs(llm):
    before = llm.engine.stats.num_prefill_steps
    llm.stream("hello", GREEDY).close()
    assert not llm.engine.has_unfinished
    assert llm.engine.stats.num_prefill_steps == before


def test_a_stream_that_is_dropped_ends_with_the_next_step(llm):
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    del stream
    llm.generate("other", GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_streams_and_generate_share_the_engine_without_mixing(llm):
    alone = {p: text_of(llm.generate(p, GREEDY, use_tqdm=False)[0]) for p in ("one", "two", "3")}
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    texts = {"one": next(first).text, "two": next(second).text}
    texts["3"] = text_of(llm.generate("3", GREEDY, use_tqdm=False)[0])
    texts["two"] += "".join(delta.text for delta in second)
    texts["one"] += "".join(delta.text for delta in first)
    assert texts == alone


def test_abort_ends_a_stream_with_what_there_is(llm):
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    first = next(stream)
    llm.abort(stream.request_id)
    (last,) = list(stream)
    assert last.output.outputs[0].finish_reason is FinishReason.ABORT
    assert last.output.outputs[0].token_ids[: len(first.token_ids)] == first.token_ids
    llm.abort(stream.request_id)  # over already: nothing happens


def test_the_stop_token_ends_the_text_and_is_named(llm):
    ids = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(ids[2],))
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == ids[2]
    assert ids[2] != EOS


def test_an_interrupt_waits_for_the_step_and_leaves_the_model_usable(llm, monkeypatch):
    expected = text_of(llm.generate("hello", GREEDY, use_tqdm=False)[0])
    step, finished_steps = llm.engine.step, []

    def interrupted_step():
        signal.raise_signal(signal.SIGINT)
        result = step()
        finished_steps.append(result)
        return result

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY, use_tqdm=False)
    assert len(finished_steps) == 1
    monkeypatch.undo()
    assert text_of(llm.generate("hello", GREEDY, use_tqdm=False)[0]) == expected


def test_a_second_interrupt_strikes_at_once(llm, monkeypatch):
    reached = []

    def stuck_step():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the step")

    monkeypatch.setattr(llm.engine, "step", stuck_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY, use_tqdm=False)
    assert not reached


def test_other_threads_than_the_main_one_may_generate(llm):
    expected = text_of(llm.generate("hello", GREEDY, use_tqdm=False)[0])
    with ThreadPoolExecutor(1) as pool:
        (output,) = pool.submit(llm.generate, "hello", GREEDY, use_tqdm=False).result()
    assert text_of(output) == expected


def test_a_request_that_fails_on_the_device_says_so_and_the_others_go_on(llm):
    expected = text_of(llm.generate("hello", GREEDY, use_tqdm=False)[0])
    bad, good = llm.generate([BROKEN, "hello"], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "the model's logits were not finite" in bad.error
    assert (text_of(good), good.error) == (expected, None)


def test_a_fault_of_the_relay_ends_the_request_that_it_hits(llm):
    expected = text_of(llm.generate("hello", GREEDY, use_tqdm=False)[0])
    stream, other = llm.stream("hello", GREEDY), llm.stream("hello", GREEDY)
    next(stream)
    engine = llm.engine
    (slot,) = [
        slot for slot, seq in engine._running.items() if seq.request.request_id == stream.request_id
    ]
    relay = engine._programs.state.future_map
    broken = relay.replace(seq_lens=relay.seq_lens.at[slot].set(0))
    engine._programs.state = engine._programs.state.replace(future_map=broken)
    last = list(stream)[-1]
    assert last.output.outputs[0].finish_reason is FinishReason.ERROR
    assert "its length was not positive" in last.output.error
    assert "".join(delta.text for delta in other) == expected


def test_an_unknown_option_names_the_near_match():
    with pytest.raises(ConfigError, match="unknown option 'max_num_seq'; did you mean"):
        LLM("smollm2-135m", max_num_seq=3)


def test_after_the_warm_up_nothing_compiles(folder, tmp_path):
    said = []
    llm = LLM(
        str(folder),
        drafter="none",
        compilation_cache=False,
        cache_dir=tmp_path,
        on_progress=lambda what, done, total: said.append(what),
        **SIZES,
    )
    assert {"loading weights", "compiling"} <= set(said)
    with count_compilations() as compiled:
        llm.generate(["hello", "a prompt of two tiles"], GREEDY, use_tqdm=False)
        llm.generate("hello", SamplingParams(max_tokens=3, top_p=0.9, seed=1), use_tqdm=False)
    assert compiled.count == 0


def test_the_compilation_cache_is_the_users_where_there_is_one(tmp_path, jax_cache_settings):
    use_compilation_cache(tmp_path / "ours")
    jax.jit(lambda x: x * 3 + 1)(np.arange(5))
    assert any((tmp_path / "ours").iterdir())
    use_compilation_cache(tmp_path / "other")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")


def test_without_a_place_for_compiled_programs_there_is_a_warning(
    tmp_path, jax_cache_settings, caplog
):
    (tmp_path / "file").touch()
    use_compilation_cache(tmp_path / "file" / "compiled")
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs cannot be kept in" in caplog.text


def test_models_are_kept_in_the_home_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "jaxspec"


def test_the_package_lists_its_public_names():
    assert {getattr(jaxspec, name) is not None for name in jaxspec.__all__} == {True}
    assert dir(jaxspec) == sorted(jaxspec.__all__)
    with pytest.raises(AttributeError, match="module 'jaxspec' has no attribute 'LMM'"):
        jaxspec.LMM  # noqa: B018
