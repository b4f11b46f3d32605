"""Several answers to one prompt: each with noise of its own, told as one request."""

import jax
import numpy as np
import pytest

from jaxspec.copies import Copies, merge_metrics
from jaxspec.engine.admission import request_key
from jaxspec.inbox import Inbox
from jaxspec.prompts import EncodedPrompt
from jaxspec.request import MAX_SEED, RequestError, RequestMetrics, SamplingParams
from jaxspec.stream import Stream
from jaxspec.threefry import fold_in
from tests.fakes import PieceDetokenizer, letters
from tests.harness import expected, make_engine, request

PROMPT = EncodedPrompt((5, 6, 7), None)
SAMPLED = dict(temperature=1.0, max_tokens=9, ignore_eos=True)


def text_inbox():
    return Inbox(make_engine(make_detokenizer=lambda _: PieceDetokenizer(letters())))


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 0xDEADBEEF_12345678, MAX_SEED])
@pytest.mark.parametrize("data", [0, 1, 127, 2**31 + 3])
def test_keys_are_those_of_jax(seed, data):
    words = (seed >> 32, seed & 0xFFFFFFFF)
    key = jax.random.wrap_key_data(np.array(words, np.uint32), impl="threefry2x32")
    want = jax.random.key_data(jax.random.fold_in(key, data)).tolist()
    assert list(fold_in(words, data)) == want
    assert request_key(seed, 9, 9, data).tolist() == want


def answers(seed, n, others=()):
    """Copies of one request beside others, and what plain decoding makes of each."""
    inbox = text_inbox()
    params = [SamplingParams(**SAMPLED, seed=seed, n=n), *others]
    names = inbox.add([PROMPT] * len(params), params)
    latest = [None]
    while not all(each is not None and each.finished for each in latest):
        inbox.step()
        latest = [inbox.latest(name) for name in names]
    output = inbox.latest(names[0])
    for name in names:
        inbox.forget(name)
    assert inbox.is_empty
    return output


def test_copy_i_is_drawn_from_fold_in_of_the_seed():
    """More copies than slots; the first is what n=1 gives, in any company."""
    asked = request("a", PROMPT.token_ids, **SAMPLED, seed=3, n=5)
    output = answers(3, 5, [SamplingParams(**SAMPLED, seed=8)])
    assert output.finished
    assert [each.index for each in output.outputs] == [0, 1, 2, 3, 4]
    for each, copy in zip(output.outputs, Copies(asked).requests, strict=True):
        assert each.token_ids == list(expected(copy))
        assert each.text == b"".join(letters()[token] for token in each.token_ids).decode()
    assert len({tuple(each.token_ids) for each in output.outputs}) == 5
    assert answers(3, 1).outputs[0].token_ids == output.outputs[0].token_ids
    assert output.metrics.num_committed == 5 * 8
    assert output.metrics.finished_s >= output.metrics.first_token_s >= output.metrics.arrival_s


def test_copies_without_a_seed_differ():
    output = answers(None, 4)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4


def test_a_stream_gives_each_copy_whole():
    inbox = text_inbox()
    (name,) = inbox.add([PROMPT], SamplingParams(**SAMPLED, seed=3, n=3))
    texts, ends = {0: "", 1: "", 2: ""}, []
    for delta in Stream(inbox, name):
        texts[delta.index] += delta.text
        if delta.finished:
            ends.append(delta.index)
    assert sorted(ends) == [0, 1, 2]
    assert [texts[each.index] for each in delta.output.outputs] == [
        each.text for each in answers(3, 3).outputs
    ]
    assert inbox.is_empty


def test_an_abort_ends_every_copy():
    inbox = text_inbox()
    (name,) = inbox.add([PROMPT], SamplingParams(**SAMPLED, seed=3, n=5))
    inbox.step()
    inbox.abort(name)
    output = inbox.latest(name)
    assert output.finished
    assert {each.finish_reason for each in output.outputs} == {"abort"}
    inbox.forget(name)
    inbox.step()
    assert not inbox._engine.has_unfinished


def test_a_refused_copy_leaves_none_behind():
    inbox = text_inbox()
    with pytest.raises(RequestError, match="token id 99 is outside the vocabulary"):
        inbox.add([EncodedPrompt((99,), None)], SamplingParams(n=3))
    assert inbox.is_empty and not inbox._engine.has_unfinished


def test_the_prompt_is_told_once():
    """Prompt log-probabilities come from the first copy alone."""
    copies = Copies(request("a", [1, 2], **SAMPLED, n=3, prompt_logprobs=1, logprobs=0))
    assert [each.params.prompt_logprobs for each in copies.requests] == [1, None, None]
    assert [each.params.logprobs for each in copies.requests] == [0, 0, 0]
    assert [each.copy_index for each in copies.requests] == [0, 1, 2]


def test_the_engine_itself_gives_one_answer_a_request():
    message = r"^n is 2, but the engine gives one answer a request; use `LLM.generate`$"
    with pytest.raises(RequestError, match=message):
        make_engine().add_request(request("a", [1], n=2, temperature=1.0))


def test_figures_of_copies_are_sums():
    several = [
        RequestMetrics(2.0, 3.0, None, num_verifies=2, accept_lengths=[1, 3]),
        RequestMetrics(1.0, None, 9.0, num_verifies=1, accept_lengths=[2]),
    ]
    merged = merge_metrics(several)
    assert (merged.arrival_s, merged.first_token_s, merged.finished_s) == (1.0, 3.0, None)
    assert (merged.num_verifies, merged.accept_lengths) == (3, [1, 3, 2])
