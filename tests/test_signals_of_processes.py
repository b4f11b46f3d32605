"""Ctrl-C and SIGTERM sent to real processes, in each phase of each command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxspec.training.report import read_metrics
from tests.tiny_model import SIZES, write_tiny_model

ROOT = Path(__file__).parents[1]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
SAID = {signal.SIGINT: "jaxspec: interrupted", signal.SIGTERM: "jaxspec: terminated"}
BOTH = pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
BAR = {"FORCE_COLOR": "1"}  # progress is shown from its first moment on
LIMIT_S = 300  # of a wait; a machine may be busy
ENGINE = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
ALONE = [option for option in ENGINE if "max-num-seqs" not in option]  # one request at a time
LONG = ["--max-tokens", "900", "--ignore-eos", "--drafter", "none", *ALONE]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    write_tiny_model(folder / "model")
    return folder


class Process:
    """A `jaxspec` command in a process of its own, read as it goes on."""

    def __init__(self, *argv, cache, environment=None):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "jaxspec", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAXSPEC_CACHE": str(cache),
                "JAX_PLATFORMS": "cpu",
                **(environment or {}),
            },
        )
        self.text = {"stdout": "", "stderr": ""}
        self._more = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self.text]
        for reader in self._readers:
            reader.start()

    def _read(self, name):
        stream = getattr(self.process, name)
        while chunk := os.read(stream.fileno(), 4096):
            with self._more:
                self.text[name] += chunk.decode(errors="replace")
                self._more.notify_all()
        stream.close()

    def wait_for(self, pattern, where="stderr"):
        """Returns once the pattern has been written."""
        until = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.text[where]):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                self.end()
                pytest.fail(f"no {pattern!r} in {self.text}")
            with self._more:
                self._more.wait(0.05)

    def say(self, text):
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def end(self):
        """The exit status, once the process is over."""
        try:
            status = self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join()
            self.process.stdin.close()
        return status

    def interrupted(self, number):
        """Sends the signal; the process must end with its status, one sentence and no traceback."""
        self.process.send_signal(number)
        assert self.end() == STATUS[number], self.text
        assert "Traceback" not in self.text["stderr"]
        assert self.text["stderr"].rstrip().endswith(SAID[number])


def whole_files(folder):
    """What a command left in its cache: nothing whose name says that it is not whole."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if "partial" in str(path) or path.suffix == ".tmp"]
    return files


def generate(home, cache):
    return Process(
        "generate", "hi", "--model", str(home / "model"), *LONG, cache=cache, environment=BAR
    )


def test_what_was_streamed_stays(home, tmp_path):
    process = generate(home, tmp_path)
    process.wait_for("..........", where="stdout")
    process.interrupted(signal.SIGINT)
    streamed = process.text["stdout"].removesuffix("\n")
    assert 10 <= len(streamed) < 900
    assert streamed.isprintable()
    whole_files(tmp_path)


@pytest.mark.nightly
@BOTH
@pytest.mark.parametrize("phase", ["compiling", "streaming"])
def test_generate_ends_in_each_phase(home, tmp_path, phase, number):
    process = generate(home, tmp_path)
    if phase == "streaming":
        process.wait_for("...", where="stdout")
    else:
        process.wait_for(phase)
    process.interrupted(number)
    whole_files(tmp_path)


@pytest.mark.nightly
@BOTH
def test_a_fetch_that_is_cut_off_leaves_neither_file_nor_process(tmp_path, number):
    """The package index takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        quiet = {
            **BAR,
            "PIP_INDEX_URL": index,
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONNOUSERSITE": "1",
        }
        process = Process("generate", "hi", cache=tmp_path, environment=quiet)
        process.wait_for("fetching")
        children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children")
        pids = children.read_text().split()
        assert pids
        process.interrupted(number)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in ([], [".lock"])
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.nightly
def test_ctrl_c_stops_an_answer_and_the_next_turn_is_served(home, tmp_path):
    process = Process("chat", "--model", str(home / "model"), *LONG, cache=tmp_path)
    process.say("hi\n")
    process.wait_for(".....", where="stdout")
    process.process.send_signal(signal.SIGINT)
    process.wait_for(r" \[stopped\]\n", where="stdout")
    process.say("more\n")
    process.wait_for(r"\[stopped\]\n.....", where="stdout")
    process.process.stdin.close()
    assert process.end() == 0
    first, _ = process.text["stdout"].splitlines()
    assert len(first.removesuffix(" [stopped]")) < 900
    assert "Traceback" not in process.text["stderr"]


@pytest.mark.nightly
@BOTH
def test_chat_ends_between_turns(home, tmp_path, number):
    short = [*LONG, "--max-tokens", "5"]
    process = Process("chat", "--model", str(home / "model"), *short, cache=tmp_path)
    process.say("hi\n")
    process.wait_for(r".{5}\n", where="stdout")
    process.wait_for("tok/s|tokens/s|ms")
    process.interrupted(number)


@pytest.mark.nightly
def test_sigterm_ends_chat_during_an_answer(home, tmp_path):
    process = Process("chat", "--model", str(home / "model"), *LONG, cache=tmp_path)
    process.say("hi\n")
    process.wait_for(".....", where="stdout")
    process.interrupted(signal.SIGTERM)


@pytest.mark.nightly
@BOTH
@pytest.mark.parametrize("phase", ["compiling", "measuring"])
def test_bench_ends_in_each_phase(home, tmp_path, phase, number):
    argv = ["bench", "throughput", "--model", str(home / "model"), *ENGINE, "--drafter", "none"]
    process = Process(*argv, "--num-prompts", "400", "--json", cache=tmp_path, environment=BAR)
    process.wait_for(phase)
    process.interrupted(number)
    assert process.text["stdout"] == ""
    whole_files(tmp_path)


@pytest.fixture(scope="module")
def data(home):
    """Conversations to train on, made by the command."""
    (home / "prompts.txt").write_text("\n".join(f"{letter} tell me" for letter in "abcdefgh"))
    argv = ["train", "data", "--model", str(home / "model"), "--output", str(home / "data")]
    argv += ["--prompts", str(home / "prompts.txt"), "--num-held-out", "2", "--max-tokens", "20"]
    argv += ["--max-prompt-tokens", "16", "--max-num-seqs", "1", "--sampled-share", "0"]
    process = Process(*argv, "--followup-share", "0", cache=home / "cache")
    assert process.end() == 0, process.text
    return home / "data"


@pytest.mark.nightly
@BOTH
def test_making_data_ends_with_whole_parts(home, tmp_path, number):
    (tmp_path / "prompts.txt").write_text("\n".join(f"{i} tell me" for i in range(3000)))
    argv = ["train", "data", "--model", str(home / "model"), "--output", str(tmp_path / "data")]
    argv += ["--prompts", str(tmp_path / "prompts.txt"), "--num-held-out", "2"]
    argv += ["--max-prompt-tokens", "16", "--max-num-seqs", "1", "--part-size", "8"]
    process = Process(*argv, "--max-tokens", "20", cache=home / "cache", environment=BAR)
    process.wait_for("conversations")
    process.interrupted(number)
    whole_files(tmp_path)


@pytest.mark.nightly
@BOTH
@pytest.mark.parametrize("save_minutes", ["10", "1e-9"], ids=["step", "checkpoint"])
def test_training_ends_with_a_checkpoint_to_go_on_from(home, data, tmp_path, save_minutes, number):
    """Saving after every step, a signal is as good as certain to meet a save."""
    out = tmp_path / "run"
    argv = ["train", "--model", str(home / "model"), "--data", str(data), "--output", str(out)]
    argv += ["--num-layers", "1", "--mask-token-id", "200", "--save-minutes", save_minutes]
    argv += ["--max-steps", "4000", "--num-features", "1", "--block-size", "4", "--row-len", "64"]
    argv += ["--batch-rows", "4", "--num-anchors", "8", "--measure-every", "4000"]
    process = Process(*argv, cache=home / "cache")
    process.wait_for(r"(?m)^step \d+")
    process.interrupted(number)
    assert re.search(r"interrupted at step \d+; go on with --resume", process.text["stderr"])
    steps = [int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit()]
    assert steps, "no checkpoint"
    whole_files(out)
    shorter = [*argv, "--resume"]
    again = Process(*shorter, cache=home / "cache")
    again.wait_for(r"(?m)^step \d+")
    again.interrupted(number)
    for entry in read_metrics(out / "metrics.jsonl"):
        json.dumps(entry)
    later = [int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(later) >= max(steps)


SLOW = """
import sys, time
from jaxspec import cli
from jaxspec.engine.compile_ahead import compile_side_by_side

class Slow:
    def compile(self):
        print("begun", flush=True)
        time.sleep(120)

def run(args, cache_dir):
    compile_side_by_side([[Slow()]])

cli.COMMANDS["models"] = cli.Command("", lambda parser: None, run)
sys.argv = ["jaxspec", "models"]
sys.exit(cli.main())
"""


@pytest.mark.nightly
@BOTH
def test_a_command_ends_while_a_program_compiles(number):
    """Nothing can interrupt XLA: the process leaves without it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    sent = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - sent < 60
    assert (process.returncode, said) == (STATUS[number], SAID[number] + "\n")
