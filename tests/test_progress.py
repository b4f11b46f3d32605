"""What takes long is shown on a terminal, and only mentioned elsewhere."""

import io

from rich.console import Console

from jaxspec.progress import ProgressDisplay


def test_a_terminal_shows_a_bar_and_clears_it():
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=True, width=80)) as progress:
        progress("loading weights", 1, 4)
        progress("compiling", 0, 0)
        progress("compiling", 3, 3)
    assert "compiling" in out.getvalue()
    assert "100%" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")  # the line is erased


def test_elsewhere_only_what_takes_long_gets_a_line():
    out = io.StringIO()
    with ProgressDisplay(Console(file=out), quiet_s=60) as progress:
        progress("loading weights", 0, 2)
        progress("loading weights", 2, 2)
    assert out.getvalue() == ""
    with ProgressDisplay(Console(file=out), quiet_s=-1) as progress:
        progress("loading weights", 1, 2)
        progress("loading weights", 2, 2)
        progress("compiling", 1, 2)
    assert out.getvalue() == "loading weights ...\ncompiling ...\n"


def test_elsewhere_a_long_stage_says_again_how_far_it_is():
    out = io.StringIO()
    with ProgressDisplay(Console(file=out), quiet_s=-1, again_s=-1) as progress:
        for done in range(3):
            progress("compiling", done, 2)
        for _ in range(3):
            progress("fetching", 7, 0)  # of nobody knows how many
    assert out.getvalue() == "compiling ...\ncompiling: 1 of 2\ncompiling: 2 of 2\nfetching ...\n"
