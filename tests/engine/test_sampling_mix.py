"""Random settings, a row each, in one batch under speculation: the text of plain decoding."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.cache.page_pool import PagePool
from jaxspec.config import Kernels
from jaxspec.request import StructuredOutputsParams
from tests import oracle
from tests.fakes import VOCAB, letters
from tests.harness import check, check_logprobs, request, run
from tests.told import told_engine

TOKENS = st.integers(0, VOCAB - 1)
WITHOUT_BRANCHES = Kernels(filter_thresholds="triton_interpret")
WORDS = st.text("".join(piece.decode() for piece in letters().values()), min_size=1, max_size=3)
# Steps of 0.25 keep the toy's logits, multiples of 0.5, exact in any order of operations.
PENALTIES = st.integers(-8, 8).map(lambda quarters: quarters / 4)


def maybe(values, neutral):
    """Half of the rows leave a field alone."""
    return st.one_of(st.just(neutral), values)


PARAMS = {
    "temperature": maybe(st.sampled_from([0.5, 0.9, 1.0, 2.0]), 0.0),
    "top_k": maybe(st.integers(-1, 9), 0),
    "top_p": maybe(st.sampled_from([0.3, 0.9]), 1.0),
    "min_p": maybe(st.sampled_from([0.05, 0.4]), 0.0),
    "seed": st.integers(0, 2**64 - 1),
    "max_tokens": maybe(st.integers(1, 14), None),
    "stop_token_ids": maybe(st.lists(TOKENS, max_size=3, unique=True), []),
    "ignore_eos": st.booleans(),
    "presence_penalty": maybe(PENALTIES, 0.0),
    "frequency_penalty": maybe(PENALTIES, 0.0),
    "repetition_penalty": maybe(st.sampled_from([0.5, 2.0, 4.0]), 1.0),
    "logit_bias": maybe(st.dictionaries(TOKENS, PENALTIES, max_size=6), None),
    "bad_words": maybe(st.lists(WORDS, max_size=4), []),
    "logprobs": maybe(st.integers(0, 20), None),
    "prompt_logprobs": maybe(st.integers(0, 20), None),
}


@st.composite
def rows(draw, index):
    """A request whose prompt begins with `index`, shorter than a tile or of several dispatches."""
    params = {name: draw(values) for name, values in PARAMS.items()}
    if draw(st.booleans()):
        params["min_tokens"] = draw(st.integers(0, params["max_tokens"] or 12))
    elif draw(st.booleans()):
        regex = draw(st.sampled_from(list(oracle.AUTOMATA)))
        params["structured_outputs"] = StructuredOutputsParams(regex=regex)
        # What a grammar asks for may be forbidden; then nothing is allowed.
        params |= dict(ignore_eos=False, stop_token_ids=[], bad_words=[])
    prompt = [index, *draw(st.lists(TOKENS, max_size=17))]
    return request(f"r{index}", prompt, **params)


@pytest.mark.nightly
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_mix_of_settings_gives_the_text_of_plain_decoding(data):
    """F23, F27: more requests than slots, drafts right as often as a script says, few pages."""
    asked = [data.draw(rows(index)) for index in range(data.draw(st.integers(1, 5)))]
    accepts = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    engine = told_engine(
        *asked,
        accepts=accepts,
        overlap=data.draw(st.booleans()),
        kernels=data.draw(st.sampled_from([Kernels(), WITHOUT_BRANCHES])),
    )
    if data.draw(st.booleans()):
        engine._use_pool(PagePool(16))
    outputs = run(engine, *asked)
    check(outputs, *asked)
    for each in asked:
        check_logprobs(outputs[each.request_id], each)
