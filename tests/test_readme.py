"""The README: its links lead somewhere, its pictures are shown, its commands are understood."""

import dataclasses
import re
import shlex
from pathlib import Path

from jaxspec import cli
from kernels_pallas import dispatch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands(first):
    """What stands in code blocks and between backticks and begins with a word, as words."""
    blocks = re.findall(r"^```\n(.*?)^```", README, flags=re.M | re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
    lines = [line for block in blocks for line in block.splitlines()] + inline
    for line in lines:
        for part in re.split(r"&&|\|(?!\|)", " ".join(line.split())):
            if part.split()[:1] == [first]:
                yield shlex.split(part, comments=True)[1:]


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", README)
    assert len(targets) > 30
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing


def test_links_within_the_page_lead_to_headings():
    headings = {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", README, flags=re.M)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in headings


def test_every_picture_is_shown():
    for path in (ROOT / "docs" / "pictures").glob("*.png"):
        assert f"(docs/pictures/{path.name})" in README


def test_every_jaxspec_command_is_understood(monkeypatch, capsys):
    ran = []
    for name, command in cli.COMMANDS.items():
        stub = dataclasses.replace(command, run=lambda args, cache_dir: ran.append(args) or 0)
        monkeypatch.setitem(cli.COMMANDS, name, stub)
    found = list(commands("jaxspec"))
    for words in found:
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
    assert len(ran) == len(found) > 10
    assert {"generate", "chat", "models", "train", "bench"} == {args.command for args in ran}


def test_every_bench_of_a_kernel_is_there():
    ops = re.findall(r"^\| `(\w+)`, ", README, flags=re.M)
    assert {"accept", "paged_attention"} <= set(ops)
    assert set(ops) <= set(dispatch.ops())


def test_every_script_is_there():
    scripts = [words for words in commands("python") if words and words[0].endswith(".py")]
    assert scripts
    for words in scripts:
        assert (ROOT / words[0]).exists()
