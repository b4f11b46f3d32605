"""Ctrl-C between two whole pieces of work, never inside one. Host only."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


@contextmanager
def held_back_interrupts() -> Iterator[None]:
    """Lets the first Ctrl-C or SIGTERM wait until the block is over; a second strikes at once.

    A step donates the engine's state and then stores the new one; an interrupt between the two
    would leave an engine without state. Elsewhere than in the main thread it does nothing, since
    Python delivers no signals there.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return
    received: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        number, frame = received[0]
        handlers[number](number, frame)


_RESEND_S = 0.05


def resend_lost_interrupts() -> None:
    """Makes a Ctrl-C count that Python would drop.

    One that arrives inside a destructor or a garbage-collection callback, of which jax has one,
    cannot be raised there; it is sent again a moment later, when other code runs.
    """
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            report(unraisable)
            return
        timer = threading.Timer(_RESEND_S, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


EXIT_TERMINATED = 143  # as of a process that SIGTERM has ended


def end_at_sigterm() -> None:
    """Makes SIGTERM leave by the way out that Ctrl-C takes: files half written are removed."""
    if threading.current_thread() is not threading.main_thread():
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one strikes at once
        raise SystemExit(EXIT_TERMINATED)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)


COMPILING = "compiling"  # how the names of threads begin that do
_NEVER_S = 3600.0
_WRITERS = ("compilation_cache.py", "lru_cache.py")  # of jax


def end_while_compiling(status: int) -> None:
    """Ends the process at once where threads compile, which nothing else can interrupt.

    Only a program that is on its way to the compilation cache is waited for, since a file half
    written would stay. Elsewhere it does nothing.
    """
    threads = [each for each in threading.enumerate() if each.name.startswith(COMPILING)]
    if not threads:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Between the look at a thread and the end, it may not come to write.
    sys.setswitchinterval(_NEVER_S)
    while any(_is_writing(each) for each in threads):
        time.sleep(0.01)
    os._exit(status)


def _is_writing(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _WRITERS:
            return True
        frame = frame.f_back
    return False
