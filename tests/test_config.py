"""What the user says, what is decided from it, and what is refused."""

import dataclasses
import re

import pytest

from jaxspec.config import ConfigError, DeviceFacts, EngineConfig, Kernels, resolve

CPU = DeviceFacts("cpu", 16 << 30)
GPU = DeviceFacts("gpu", 16 << 30)


def decide(config=None, *, device=CPU, **changes):
    facts = dict(
        vocab_size=1000,
        model_max_len=2048,
        block_size=8,
        kv_bytes_per_token=1 << 10,
        weight_bytes=1 << 20,
        dtype="float32",
        kernels=Kernels(),
    )
    return resolve(config or EngineConfig(), device=device, **{**facts, **changes})


def test_defaults_on_cpu_are_decided_in_full():
    geometry = decide()
    assert dataclasses.asdict(geometry) == {
        "vocab_size": 1000,
        "num_slots": 8,
        "num_pages": 1 + 8 * 65,
        "page_size": 32,
        "pages_per_slot": 65,  # 2048 tokens and two blocks of 8
        "max_model_len": 2048,
        "block_size": 8,
        "prefill_tile": 16,
        "prefill_buckets": (1, 2, 4, 8, 16, 32, 64),
        "max_num_batched_tokens": 1024,
        "batch_buckets": (1, 2, 4, 8),
        "decode_steps": 1,
        "loop_unroll": 1,
        "chunked_prefill": True,
        "max_stop_ids": 16,
        "dtype": "float32",
        "kernels": dataclasses.asdict(Kernels()),
        "accept_rule": "keyed",
        "draft_noise": "keyed",
        "force_accept": None,
        "poison": False,
    }
    assert isinstance(hash(geometry), int)


def test_a_gpu_gets_larger_pages_and_tiles():
    geometry = decide(device=GPU)
    assert (geometry.page_size, geometry.prefill_tile) == (64, 64)


def test_small_models_run_four_steps_a_dispatch_on_a_gpu():
    small, large = dict(weight_bytes=(1 << 30) - 1), dict(weight_bytes=1 << 30)
    assert decide(device=GPU, **small).decode_steps == 4
    assert decide(device=GPU, **large).decode_steps == 1
    assert decide(**small).decode_steps == 1
    assert decide(device=GPU, tree_depth=7, **small).decode_steps == 1
    assert decide(EngineConfig(decode_steps=2), device=GPU, **small).decode_steps == 2


def test_a_gpu_runs_up_to_four_steps_in_a_turn_of_a_loop():
    turns = {}
    for steps in (1, 2, 3, 4, 6, 7, 16):
        config = EngineConfig(decode_steps=steps)
        turns[steps] = decide(config, device=GPU).loop_unroll
        assert decide(config).loop_unroll == 1
    assert turns == {1: 1, 2: 2, 3: 3, 4: 4, 6: 3, 7: 1, 16: 4}


def test_what_the_user_says_wins():
    config = EngineConfig(
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=33,
        page_size=4,
        kv_cache_tokens=200,
        decode_steps=2,
        force_accept=7,
        poison=True,
    )
    geometry = decide(config)
    assert geometry.pages_per_slot == 33  # 100 tokens and two dispatches of two blocks of 8
    assert geometry.num_pages == 1 + 50
    assert geometry.batch_buckets == (1, 2, 4)
    assert (geometry.prefill_buckets, geometry.max_num_batched_tokens) == ((1, 2, 4), 33)
    assert (geometry.decode_steps, geometry.force_accept, geometry.poison) == (2, 7, True)


def test_the_last_buckets_hold_every_slot_and_all_batched_tokens():
    for slots, last in ((1, 1), (2, 2), (5, 8), (8, 8)):
        assert decide(EngineConfig(max_num_seqs=slots)).batch_buckets[-1] == last
    assert decide(EngineConfig(max_num_batched_tokens=1)).prefill_buckets == (1,)


def test_the_pool_never_exceeds_what_all_slots_can_use():
    config = EngineConfig(max_model_len=64, max_num_seqs=2, kv_cache_tokens=1 << 20)
    assert decide(config).num_pages == 1 + 2 * 3


def test_a_gpu_pool_takes_its_share_of_the_memory():
    # 0.5 of 16 GiB, less 7 GiB of weights, is 1 GiB: 1024 pages of 64 rows of 16 KiB.
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=100)
    geometry = decide(config, device=GPU, weight_bytes=7 << 30, kv_bytes_per_token=16 << 10)
    assert geometry.num_pages == 1 + 1024


def test_a_gpu_of_unknown_memory_gets_the_hosts_limit():
    device = DeviceFacts("gpu", None)
    assert decide(device=device, kv_bytes_per_token=1 << 20).num_pages == 1 + 33


def test_page_counts_round_up():
    geometry = decide(EngineConfig(page_size=4, decode_steps=3))
    assert [geometry.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert geometry.max_commit == 24
    assert geometry.pages_at_most(5) == 14  # 5 tokens and two dispatches of 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of auto, float32, bfloat16, float16"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be at least 1"),
        ({"ngram_max": 0}, "ngram_max is 0; it must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
        ({"kv_cache_tokens": -1}, "kv_cache_tokens is -1; it must be at least 1"),
        ({"draft_window": 0}, "draft_window is 0; it must be at least 1"),
        ({"decode_steps": 0}, "decode_steps is 0; it must be at least 1"),
        ({"block_size": 1}, "block_size is 1; it must be at least 2"),
        ({"tree_nodes": 1}, "tree_nodes is 1; it must be at least 2"),
        ({"tree_nodes": 65}, "tree_nodes is 65; it must be at most 64, what the kernels take"),
        ({"tree_nodes": 9, "tree_topk": 0}, "tree_topk is 0; it must be at least 1"),
        (
            {"tree_topk": 4},
            "tree_topk is 4, but tree_nodes is not set; say how many tokens a tree has",
        ),
        ({"force_accept": -1}, "force_accept is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        (
            {"gpu_memory_utilization": 0.0},
            "gpu_memory_utilization is 0.0; it must be above 0 and at most 1",
        ),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization is 1.5; it must be above 0 and at most 1",
        ),
        ({"page_size": 0}, "page_size is 0; it must be a power of two"),
        ({"page_size": 12}, "page_size is 12; it must be a power of two"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(")):
        EngineConfig(**settings)


@pytest.mark.parametrize("name", ["gpu_memory_utilization"])
def test_not_a_number_is_refused(name):
    with pytest.raises(ConfigError, match="is nan"):
        EngineConfig(**{name: float("nan")})


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^unknown option 'max_model_length'; did you mean 'max_model_len'\?$"
    ):
        EngineConfig.from_kwargs(max_model_length=3)
    assert EngineConfig.from_kwargs(max_model_len=3).max_model_len == 3


def test_an_unknown_option_like_no_other_lists_all():
    with pytest.raises(ConfigError, match=r"^unknown option 'zzz'; known: accept_rule, .* seed"):
        EngineConfig.from_kwargs(zzz=1)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^max_model_len is 4096, but the model's positions end at 2048; lower it$",
    ):
        decide(EngineConfig(max_model_len=4096))


def test_forcing_more_drafts_than_a_block_holds_is_refused():
    with pytest.raises(
        ConfigError, match=r"^force_accept is 8, but a block of 8 holds 7 drafts; lower it$"
    ):
        decide(EngineConfig(force_accept=8))
    assert decide(EngineConfig(force_accept=7)).force_accept == 7
    with pytest.raises(ConfigError, match=r"but a path of the tree holds 3 drafts; lower it$"):
        decide(EngineConfig(force_accept=4), tree_depth=3)
    assert decide(EngineConfig(force_accept=3), tree_depth=3).force_accept == 3


def test_a_pool_smaller_than_one_request_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^one request of max_model_len needs 65 KV pages of 32 tokens, but "
        r"kv_cache_tokens 100 gives 4; lower max_model_len or raise that limit$",
    ):
        decide(EngineConfig(kv_cache_tokens=100))


def test_weights_that_leave_no_memory_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"but 0.00 GB beside the weights \(gpu_memory_utilization 0.9\) gives 0; lower",
    ):
        decide(device=GPU, weight_bytes=20 << 30)


def test_an_unknown_kind_of_batch_to_compile_for_is_refused():
    message = (
        "warm_up is 'logits'; it must be one of greedy, sampled, edited, logprobs, constrained, "
        "prompt_logprobs"
    )
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        EngineConfig(warm_up=("greedy", "logits"))


def test_rejection_takes_no_trees():
    message = (
        "accept_rule is 'rejection', which takes drafts one behind the other, but tree_nodes is 8; "
        "leave out the one or the other"
    )
    with pytest.raises(ConfigError, match="^" + re.escape(message) + "$"):
        EngineConfig(accept_rule="rejection", tree_nodes=8)
    with pytest.raises(ConfigError, match=r"^accept_rule is 'x'; it must be one of keyed, rej"):
        EngineConfig(accept_rule="x")
    with pytest.raises(ConfigError, match=r"^draft_noise is 'x'; it must be one of keyed, none$"):
        EngineConfig(draft_noise="x")
