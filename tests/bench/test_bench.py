"""Every mode of `jaxspec bench` on a tiny model, and what its figures must add up to."""

import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxspec import cli
from jaxspec.bench import roofline, shape_rig, startup, throughput
from jaxspec.bench.command import MODES, default_drafters
from jaxspec.bench.compilations import count_compilations
from jaxspec.bench.features import FEATURES
from jaxspec.bench.floor import (
    Machine,
    Work,
    dflash_step,
    eagle3_step,
    matmul_flops_per_s,
    plain_step,
    prefill_flops,
)
from jaxspec.bench.prompts import PROMPTS
from jaxspec.bench.report import bars, number
from jaxspec.bench.rig import build_engine, load_rig, make_requests, run_workload
from jaxspec.bench.settings import SHAPE_NAMES, Settings
from jaxspec.bench.shape_rig import ShapeRig, fill_kv
from jaxspec.bench.shapes import SHAPES
from jaxspec.bench.shapes import random_target as shape_target
from jaxspec.bench.step_profile import family
from jaxspec.bench.step_times import time_steps
from jaxspec.bench.throughput import concurrencies
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine.state import init_state
from jaxspec.models.config import ModelConfig
from jaxspec.training import eagle
from jaxspec.training.config import Eagle3TrainConfig, TrainConfig
from jaxspec.training.dflash import init_params as init_dflash
from jaxspec.training.eagle import EagleTarget
from jaxspec.training.export import export_drafter
from jaxspec.training.setup import drafter_config, eagle3_config
from jaxspec.weights.config_json import read_model_config
from jaxspec.weights.files import no_progress
from tests.tiny_model import SIZES, write_tiny_model
from tests.training.tiny import target_params as random_target

SMALL = ["--num-prompts", "2", "--max-tokens", "6", "--repeats", "2"]
SMALL += [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(folder, capfd, monkeypatch, tmp_path):
    """Runs `jaxspec bench` in this process: (exit status, stdout, stderr)."""

    def run(*argv):
        monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        options = ["--model", str(folder), "--no-compilation-cache", *SMALL]
        status = cli.main(["bench", *options, *argv])
        return status, *capfd.readouterr()

    return run


def rows_of(bench, *argv):
    status, out, err = bench(*argv, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert {"command", "date", "device", "versions", "mode", "settings", "notes"} < set(result)
    return result["rows"]


def test_plain_decoding_is_compared_with_each_drafter(bench):
    plain, ngram = rows_of(bench)
    assert [plain["drafter"], ngram["drafter"]] == ["none", "ngram"]
    assert plain["speedup"] == 1.0
    for row in (plain, ngram):
        assert row["num_compilations"] == 0
        assert row["num_equal_texts"] == 2
        assert row["lossless"] is True
        assert row["num_tokens"] == row["num_committed"] + 2  # a token of each comes with prefill
        assert row["mean_accept_length"] == 1 + row["num_accepted"] / row["num_verifies"]
        assert sum(row["accept_lengths"].values()) == row["num_verifies"]
        assert row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["wall_s"])
        assert row["host_ms"] > 0
        assert 0 <= row["exposed_host_ms"] <= row["engine_step_ms"]
    assert plain["num_draft_tokens"] == 0
    assert ngram["num_draft_tokens"] == 7 * ngram["num_verifies"]


def test_the_table_holds_the_drafters_and_the_histogram(bench):
    status, out, _ = bench("compare")
    assert status == 0
    assert "plain decoding against drafters" in out
    assert "accept lengths of none: 1:100%" in out


def test_latency_is_of_one_request_at_a_time(bench):
    plain, ngram = rows_of(bench, "latency")
    for row in (plain, ngram):
        assert 0 < row["first_token_ms_p50"] <= row["first_token_ms_p95"]
        assert 0 < row["token_ms_p50"] <= row["token_ms_p95"]


def test_throughput_serves_the_prompts_that_it_is_given(bench, monkeypatch, tmp_path):
    file, served = tmp_path / "own.txt", []
    file.write_text("Why?\nHow?\n")

    def recorded(rig, count, **options):
        served.extend(make_requests(rig, count, **options))
        return served

    monkeypatch.setattr(throughput, "make_requests", recorded)
    (row,) = rows_of(bench, "throughput", "--drafter", "none", "--prompts", str(file))
    assert [request.prompt for request in served] == ["Why?", "How?"]
    assert row["num_tokens"] == 2 * 6
    status, _, err = bench("throughput", "--prompts", str(tmp_path / "missing.txt"))
    assert status == 2
    assert "cannot be read as prompts" in err


def test_throughput_goes_up_to_all_slots(bench):
    rows = rows_of(bench, "throughput", "--drafter", "none")
    assert [row["concurrency"] for row in rows] == [1]
    assert rows[0]["num_compilations"] == 0
    assert [concurrencies(n) for n in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


def random_drafters(folder) -> tuple[str, str]:
    """An EAGLE-3 head and a DFlash drafter for the tiny model that guess at random."""
    target = read_model_config(folder / "model")
    frozen = EagleTarget(random_target(0, target), jnp.arange(target.vocab_size, dtype=jnp.int32))
    eagle3 = eagle3_config(Eagle3TrainConfig(num_features=1), target, target.vocab_size)
    head = eagle.init_params(eagle3, jax.random.key(0), frozen)
    dflash = drafter_config(TrainConfig(num_layers=1, num_features=1, block_size=4), target, 200)
    block = init_dflash(dflash, jax.random.key(0), final_norm=jnp.ones(target.hidden_size))
    head = head.replace(target_ids=frozen.target_ids)
    for name, params, config in (("eagle3", head, eagle3), ("dflash", block, dflash)):
        export_drafter(folder / name, params, config, target, card="random")
    return str(folder / "eagle3"), str(folder / "dflash")


@pytest.mark.nightly
def test_chains_and_trees_stand_in_one_table(bench, folder):
    """Each drafter with settings of its own, at the concurrencies asked for."""
    home = folder.parent / "drafters"
    home.mkdir()
    (home / "model").symlink_to(folder)
    eagle3, dflash = random_drafters(home)
    asked = [
        "none",
        f"{dflash}",
        f"{dflash},tree_nodes=9,tree_topk=3",
        f"{eagle3},block_size=4",
        f"{eagle3},block_size=4,tree_nodes=9,tree_topk=3",
    ]
    options = ["--concurrency", "1", "--concurrency", "2", "--max-num-seqs", "2"]
    options += [word for text in asked for word in ("--drafter", text)]
    rows = rows_of(bench, "throughput", *options)
    assert [(row["drafter"], row["concurrency"]) for row in rows] == [
        (name, at_once)
        for name in ("none", "dflash", "dflash", "eagle3", "eagle3")
        for at_once in (1, 2)
    ]
    drafts = ["none", "chain of 3", "tree of 8, 3 deep", "chain of 3", "tree of 8, 3 deep"]
    assert [row["drafts"] for row in rows[::2]] == drafts
    for row in rows:
        assert row["num_compilations"] == 0
        assert row["mean_accept_length"] >= 1.0 and row["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ngram,tree_node=9"], "unknown setting 'tree_node'; did you mean 'tree_nodes'?"),
        (["none", "ngram,block_size=x"], "block_size: 'x' is not a whole number"),
        (["ngram,overlap=1"], "overlap cannot be set here; give it as an option of all"),
        (["ngram,fast"], "'fast' is no setting; write name=value"),
        (["ngram,tree_topk=2"], "tree_topk is 2, but tree_nodes is not set"),
    ],
)
def test_a_mistake_in_a_drafters_settings_is_named_before_any_run(bench, words, message):
    options = [word for text in words for word in ("--drafter", text)]
    status, _, err = bench("throughput", *options)
    assert status == 2 and message in err


def test_no_more_run_at_once_than_there_are(bench):
    few = ["--drafter", "none", "--concurrency"]
    for options, message in (
        ([*few, "2"], "2 requests are to run at once, but max_num_seqs is 1; raise it"),
        ([*few, "8", "--max-num-seqs", "8"], "8 requests are .*, but num_prompts is 2; raise it"),
        ([*few, "0"], "concurrency is 0; it must be at least 1"),
    ):
        status, _, err = bench("throughput", *options)
        assert status == 2 and re.search(message, err)


def test_acceptance_is_told_by_kind_and_temperature(bench, tmp_path):
    picture = tmp_path / "plot.png"
    hot = ["--temperature", "0", "--temperature", "1", "--plot", str(picture)]
    rows = rows_of(bench, "acceptance", "--limit", "4", *hot)
    kinds = ["question", "list", "built-in"]
    assert [(row["temperature"], row["prompts"]) for row in rows] == [
        *((0.0, kind) for kind in kinds),
        *((1.0, kind) for kind in kinds),
    ]
    for name in ("num_verifies", "num_draft_tokens", "num_accepted", "num_committed", "num_looped"):
        assert rows[0][name] + rows[1][name] == rows[2][name]
    assert rows[2]["tokens_per_s"] > 0
    assert picture.stat().st_size > 0


def test_the_drafter_that_is_shipped_is_measured_without_being_named():
    mode = MODES["compare"]
    assert default_drafters(mode, "smollm2-135m") == ("none", "ngram", "dflash")
    assert default_drafters(mode, "./folder") == ("none", "ngram")
    assert default_drafters(MODES["host"], "smollm2-135m") == ("none", "ngram")


def test_the_host_is_measured_against_a_null_device(bench):
    (row,) = rows_of(bench, "host", "--drafter", "ngram")
    assert row["tokens_per_step"] == 8
    assert 0 < row["dispatch_cpu_ms"] < row["host_cpu_ms"]
    assert row["device_step_ms"] > 0


@pytest.mark.nightly
def test_loops_of_steps_are_measured_by_the_step_and_forced_accepts_are_marked(bench):
    loops = ["--drafter", "ngram", "--decode-steps", "4", "--force-accept", "7"]
    (work,) = rows_of(bench, "compare", *loops)
    assert (work["decode_steps"], work["lossless"]) == (4, False)
    assert work["mean_accept_length"] == 8
    assert work["num_compilations"] == 0
    (host,) = rows_of(bench, "host", *loops)
    assert 0 < host["dispatch_cpu_ms"] < host["host_cpu_ms"]
    (forward,) = rows_of(bench, "forward", *loops)
    assert forward["engine_ms"] > 0
    assert "NOT LOSSLESS: force_accept is set" in bench("latency", *loops)[1]


def test_a_step_is_held_against_the_bare_forward(bench):
    rows = rows_of(bench, "forward")
    assert [row["block_size"] for row in rows] == [1, 8]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["engine_ms"] / row["forward_ms"])


@pytest.mark.nightly
def test_prefill_is_held_against_the_floor(bench):
    (row,) = rows_of(bench, "prefill")
    assert row["num_tokens"] == 1000
    assert row["ratio"] == pytest.approx(row["prefill_ms"] / row["floor_ms"])


def test_numbers_take_the_place_of_zeros_without_a_copy_of_the_kv():
    shape = SHAPES["tiny"]
    rig = ShapeRig(
        EngineConfig(max_num_seqs=2),
        shape,
        shape_target(shape.target, "float32"),
        drafter="dflash",
        dtype="float32",
        batches=(2,),
        split=False,
    )
    state = init_state(rig.geometry, rig.target, rig.drafter)
    memory = fill_kv.lower(state).compile().memory_analysis()
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes < 1 << 16
    assert all(float(abs(leaf).max()) > 0.5 for leaf in fill_kv(state).kv)


def test_split_steps_are_dispatched_one_by_one(monkeypatch):
    """Whatever is the default: the program of several would not be split."""
    asked = []

    def build_engine(config, *args, **settings):
        asked.append(config.decode_steps)
        raise ConfigError("enough")

    monkeypatch.setattr(shape_rig, "build_engine", build_engine)
    shape = SHAPES["tiny"]
    target = shape_target(shape.target, "float32")
    sizes = {"drafter": "none", "dtype": "float32", "batches": (2,)}
    for split in (False, True):
        with pytest.raises(ConfigError, match="enough"):
            ShapeRig(EngineConfig(decode_steps=4), shape, target, split=split, **sizes)
    assert asked == [4, 1]


ROOFLINE = ["roofline", "--shape", "tiny", "--context", "40", "--max-model-len", "128"]


@pytest.mark.nightly
def test_steps_are_held_against_the_floor(bench, monkeypatch):
    monkeypatch.setattr(roofline, "PROMPTS", (30,))
    options = ["--batch", "2", "--max-num-seqs", "2", "--max-tokens", "60", "--repeats", "1"]
    plain, dflash, *prefills = rows_of(bench, *ROOFLINE, *options)
    assert [row["step"] for row in prefills] == ["plain prefill", "dflash prefill"]
    for row in prefills:
        assert (row["batch"], row["context"]) == (1, 30)
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert row["predicted_bytes"] > 0
    assert [(row["step"], row["batch"]) for row in (plain, dflash)] == [("plain", 2), ("dflash", 2)]
    assert (plain["accept_length"], dflash["accept_length"]) == (1, 4)
    for row in (plain, dflash):
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert row["num_compilations"] == 0
        assert row["dispatch_ms"] > 0
        # Every step of every request commits what was forced.
        a_step = row["tokens_per_s"] * row["ms"] / 1e3
        assert a_step == pytest.approx(2 * row["accept_length"])
        assert 40 < row["context"] < 40 + 60


@pytest.mark.nightly
def test_steps_of_eagle3_are_held_against_the_floor(bench):
    options = ["--batch", "1", "--max-tokens", "60", "--repeats", "1"]
    (row,) = rows_of(bench, *ROOFLINE, *options, "--drafter", "eagle3")
    assert (row["step"], row["accept_length"], row["num_compilations"]) == ("eagle3", 6, 0)
    assert row["tokens_per_s"] * row["ms"] / 1e3 == pytest.approx(6)


@pytest.mark.nightly
def test_split_steps_and_loops_of_steps_are_held_against_the_floor(bench):
    options = ["--batch", "1", "--max-tokens", "60", "--repeats", "1"]
    (split,) = rows_of(bench, *ROOFLINE, *options, "--drafter", "dflash", "--split")
    (loop,) = rows_of(bench, *ROOFLINE, *options, "--drafter", "none", "--decode-steps", "4")
    assert (split["form"], split["accept_length"]) == ("split", 4)
    assert (loop["form"], loop["decode_steps"]) == ("fused", 4)


def test_mixes_of_requests_lose_nothing(bench):
    argv = ["serve-mix", "--prefix", "40", "--page-size", "8", "--max-tokens", "8"]
    rows = rows_of(bench, *argv, "--num-prompts", "4", "--max-num-seqs", "2")
    assert {row["mix"]: row["num_requests"] for row in rows} == {
        "common prefix": 4,
        "long prompts": 4,
        "long answers": 4,
        "overload": 4,
    }
    for row in rows:
        assert (row["num_lost"], row["num_compilations"]) == (0, 0)
        assert row["num_equal_texts"] == 4
        assert 0 < row["first_token_s_p50"] <= row["first_token_s_p99"] <= row["wall_s"]
    cold, cached = rows[:2]
    assert (cold["num_cached_tokens"], cached["num_cached_tokens"]) == (0, 3 * 40)
    assert rows[-1]["num_tokens"] == rows[-2]["num_tokens"] == 4 * 16


@pytest.mark.nightly
def test_a_start_is_timed_in_a_process_of_its_own(folder, tmp_path):
    settings = Settings(
        config=EngineConfig(model=str(folder)),
        cache_dir=tmp_path,
        drafters=("none",),
        num_prompts=1,
        max_tokens=1,
        repeats=1,
        on_progress=no_progress,
    )
    compiled = tmp_path / "compiled"
    measured = startup.start(settings, "none", compiled)
    assert 0 < measured.first_token_s <= measured.wall_s
    assert measured.cpu_s > 0
    assert measured.peak_mb > 50
    assert any(path.name.startswith("jit_decode_step") for path in compiled.iterdir())


def test_a_cold_start_is_held_against_the_median_of_warm_ones(bench, monkeypatch):
    folders, times = [], iter([9.0, 2.0, 4.0, 3.0])

    def start(settings, drafter, compiled):
        folders.append(compiled)
        return startup.Start(next(times), 10.0, 12.0, 600.0)

    monkeypatch.setattr(startup, "start", start)
    cold, warm = rows_of(bench, "startup", "--repeats", "3")
    assert (cold["start"], cold["first_token_s"]) == ("cold", 9.0)
    assert (warm["start"], warm["first_token_s"]) == ("warm", 3.0)
    assert len(set(folders)) == 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["laten"], "invalid choice: 'laten'"),
        (["--num-prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["--repeat", "3"], "unknown option '--repeat'; did you mean '--repeats'?"),
        (["startup", "--drafter", "./nowhere"], "./nowhere"),
        (["roofline", "--shape", "giant"], "shape is 'giant'; it must be one of qwen3-8b"),
        (["roofline", "--batch", "0"], "batch is 0; it must be at least 1"),
        (["serve-mix", "--prefix", "0"], "prefix is 0; it must be at least 1"),
        (["serve-mix", "--mix", "overlod"], "unknown mix 'overlod'; did you mean 'overload'?"),
        (["serve-mix"], "max_model_len is 1024, but prefix and answers need 1036; raise it"),
        (["roofline", "--context", "0"], "context is 0; it must be at least 1"),
        ([*ROOFLINE, "--batch", "9"], "batch is 9, but max_num_seqs is 1; raise it"),
        ([*ROOFLINE, "--batch", "1", "--drafter", "ngram"], "drafter is 'ngram'; roofline"),
        ([*ROOFLINE, "--split", "--decode-steps", "4"], "decode_steps is 4, but there is no loop"),
        (
            [*ROOFLINE, "--batch", "1", "--max-tokens", "100"],
            "context 40 and max_tokens 100 make 140 tokens, but max_model_len is 128",
        ),
        (
            [*ROOFLINE, "--batch", "1", "--max-tokens", "9", "--drafter", "dflash"],
            "max_tokens is 9, too few to time dispatches of 4",
        ),
    ],
)
def test_mistakes_are_refused(bench, argv, text):
    status, out, err = bench(*argv)
    assert (status, out) == (2, "")
    assert text in err


def test_a_context_too_short_to_time_steps_is_refused(folder, tmp_path):
    config = EngineConfig(model=str(folder), drafter="ngram", max_model_len=128, max_num_seqs=1)
    rig = load_rig(config, cache_dir=tmp_path, on_progress=no_progress)
    with pytest.raises(ConfigError, match="max_model_len is 128, but timing 52 dispatches of 8"):
        time_steps(rig, num_requests=1)


def test_compilations_are_counted(folder):
    import jax

    with count_compilations() as compiled:
        jax.jit(lambda x: x * 5 - 2)(jnp.arange(7))
    assert compiled.count >= 1
    before = compiled.count
    jax.jit(lambda x: x * 7 - 2)(jnp.arange(7))
    assert compiled.count == before


def test_the_workload_keeps_to_its_concurrency(folder, tmp_path):
    config = EngineConfig(model=str(folder), drafter="none", **SIZES)
    rig = load_rig(config, cache_dir=tmp_path, on_progress=no_progress)
    requests = make_requests(rig, len(PROMPTS) + 1, max_tokens=1)
    assert requests[-1].prompt == PROMPTS[0].text
    run = run_workload(build_engine(rig), requests[:3], concurrency=1)
    assert [output.prompt for output in run.outputs] == [prompt.text for prompt in PROMPTS[:3]]
    assert run.step_ms is None  # one token each: nothing was decoded


def test_the_floor_counts_every_product_once():
    config = ModelConfig(
        architecture="llama",
        vocab_size=7,
        hidden_size=4,
        intermediate_size=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    # Weights a layer: qkv 4 * 8, o 4 * 4, mlp 3 * 4 * 6 = 120; attention over 3 tokens: 1 + 2 + 3
    # positions, 4 wide, scores and values; logits 4 * 7.
    assert prefill_flops(config, 3) == 2 * (2 * (120 * 3 + 2 * 4 * 6) + 28)


def test_the_floor_of_a_step_reads_every_weight_and_row_once():
    """The figures of Qwen3-8B that were worked out by hand for one H200."""
    target, drafter, eagle3 = SHAPES["qwen3-8b"]
    machine = Machine(copy_bytes_per_s=4.3e12, flops_per_s=790e12)
    sizes = {"context": 1024, "itemsize": 2}
    plain = plain_step(target, batch=1, **sizes)
    assert 1e3 * plain.floor_s(machine) == pytest.approx(3.56, abs=0.01)
    one = dflash_step(target, drafter, block=16, batch=1, **sizes)
    assert 1e3 * one.floor_s(machine) == pytest.approx(4.34, abs=0.01)
    many = dflash_step(target, drafter, block=16, batch=32, **sizes)
    assert 1e3 * many.floor_s(machine) == pytest.approx(11.9, abs=0.05)
    # Seven drafts: each reads qkv 6144 x 8192, o 4096 x 4096, the MLP's 3 x 4096 x 12288, the head
    # of 32,000 ids and 1,032 rows of KV; features are mixed once, 4096 x 12288.
    layer = 6144 * 8192 + 4096 * 4096 + 3 * 4096 * 12288
    draft = layer + 32_000 * 4096 + 1032 * 2 * 8 * 128
    chain = eagle3_step(target, eagle3, block=8, batch=1, **sizes)
    verify = plain_step(target, batch=1, context=1024 + 7, itemsize=2)
    assert chain.num_bytes == verify.num_bytes + 2 * (7 * draft + 4096 * 12288)
    flops = 8 * verify.flops + 2 * (7 * 32_000 * 4096 + 8 * 4096 * 12288 + (8 + 6) * layer)
    assert chain.flops == flops
    assert Work(10, 30).floor_s(Machine(10.0, 10.0)) == 3.0


def test_shapes_are_named_where_no_jax_is_imported():
    assert tuple(SHAPES) == SHAPE_NAMES


def test_copies_of_a_kernel_are_one_family():
    names = ["loop_add_fusion", "loop_add_fusion_12", "input_reduce.3_1", "nvjet_tst_64x8"]
    assert [family(name) for name in names] == [
        "loop_add_fusion",
        "loop_add_fusion",
        "input_reduce",
        "nvjet_tst_64x8",
    ]


def test_the_machine_is_measured():
    assert matmul_flops_per_s("float32", size=64, repeats=2) > 0


def test_numbers_and_histograms_are_written_for_people():
    assert (number(2)(1.005), number(1)(None)) == ("1.00", "-")
    assert bars({1: 3, 8: 1}) == "1:75% 8:25%"


@pytest.mark.nightly
def test_each_sampling_feature_is_timed(bench):
    """Two rounds, one engine: what a round leaves in it compiles nothing in the next."""
    rows = rows_of(bench, "features", "--drafter", "ngram", "--max-num-seqs", "3")
    assert [row["feature"] for row in rows] == list(FEATURES)
    assert rows[0]["mode"] == rows[-1]["mode"] == "greedy" and rows[0]["extra_ms"] == 0.0
    assert {row["mode"] for row in rows} == {
        "greedy",
        "sampled",
        "edited",
        "logprobs",
        "constrained",
    }
    for row in rows:
        assert row["step_ms"] == min(row["rounds_ms"]) > 0 and len(row["rounds_ms"]) == 2
        assert row["extra_ms"] == row["step_ms"] - rows[0]["step_ms"]
        assert 1 <= row["mean_accept_length"] <= 8
        assert row["num_compilations"] == 0
