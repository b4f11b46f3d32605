"""SIGTERM and Ctrl-C in every phase of a command: nothing half written, the right exit status."""

import signal
import sys

import pytest

from jaxspec import cli
from jaxspec.interrupts import end_at_sigterm, held_back_interrupts
from jaxspec.progress import ProgressDisplay
from jaxspec.stream import Stream
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def default_sigterm():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def interrupt_at(monkeypatch, phase, number):
    """Sends the signal when the command has come so far; tells afterwards whether it had."""
    sent = []

    def send():
        if not sent:
            sent.append(number)
            signal.raise_signal(number)

    if phase == "streaming":
        following = Stream.__next__

        def next_and_send(stream):
            delta = following(stream)
            send()
            return delta

        monkeypatch.setattr(Stream, "__next__", next_and_send)
        return sent
    shown = ProgressDisplay.__call__

    def show_and_send(display, what, *counts):
        shown(display, what, *counts)
        if what.startswith(phase):
            send()

    monkeypatch.setattr(ProgressDisplay, "__call__", show_and_send)
    return sent


@pytest.mark.parametrize("phase", ["loading", "compiling", "streaming"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_generate_in_any_phase(
    default_sigterm, monkeypatch, tmp_path, capfd, folder, phase, number, status
):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    sent = interrupt_at(monkeypatch, phase, number)
    argv = ["generate", "hi", "--model", folder, "--max-tokens", "9", "--ignore-eos"]
    argv += ["--no-compilation-cache", "--drafter", "none"]
    try:
        ended = cli.main(argv)
    except SystemExit as leaving:
        ended = leaving.code
    assert sent == [number]
    assert ended == status
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.endswith("jaxspec: interrupted\n" if status == 130 else "jaxspec: terminated\n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_sigterm_waits_for_the_end_of_a_step(default_sigterm):
    end_at_sigterm()
    done = []
    with pytest.raises(SystemExit), held_back_interrupts():
        signal.raise_signal(signal.SIGTERM)
        done.append("the state is stored")
    assert done


def test_another_signal_beside_a_held_one_strikes_at_once(default_sigterm):
    end_at_sigterm()
    with pytest.raises(KeyboardInterrupt), held_back_interrupts():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second was held back too")


def test_a_second_sigterm_strikes_at_once(default_sigterm):
    end_at_sigterm()
    with pytest.raises(SystemExit) as leaving:
        signal.raise_signal(signal.SIGTERM)
    assert leaving.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_programs_own_handler_of_sigterm_stays(default_sigterm):
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    end_at_sigterm()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert "jaxspec" in sys.modules
