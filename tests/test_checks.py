"""Settings of a wrong type are refused in a sentence, wherever they come in."""

import pytest

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.request import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_model_len", 2.5, "a whole number, or None"),
        ("max_num_seqs", "2", "a whole number"),
        ("drafter", None, "text"),
        ("model", None, "text"),
        ("overlap", "no", "True or False"),
        ("gpu_memory_utilization", "0.5", "a number"),
        ("block_size", True, "a whole number, or None"),
    ],
)
def test_engine_settings_of_another_type_are_refused(field, value, words):
    with pytest.raises(ConfigError, match=f"{field} is .*; it must be {words}"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop", [5], "text or a list of texts"),
        ("stop", 5, "text or a list of texts"),
        ("stop_token_ids", 5, "a list of whole numbers"),
        ("stop_token_ids", "ab", "a list of whole numbers"),
        ("ignore_eos", "no", "True or False"),
        ("skip_special_tokens", 1, "True or False"),
    ],
)
def test_sampling_settings_of_another_type_are_refused(field, value, words):
    with pytest.raises(RequestError, match=f"{field} is .*; it must be {words}"):
        SamplingParams(**{field: value})


def test_a_block_beyond_what_the_kernels_take_is_refused():
    with pytest.raises(ConfigError, match="block_size is 65; it must be at most 64"):
        EngineConfig(block_size=65)
