"""Each row that the engine answers for is named in the docstring of some test."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = range(1, 35)


@functools.cache
def rows_named():
    """Row -> files whose test docstrings name it; F3, F1-F8 style ranges are not expanded."""
    named = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        docs = [ast.get_docstring(tree) or ""]
        docs += [
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        for row in re.findall(r"\bF(\d+)\b", " ".join(docs)):
            named.setdefault(int(row), set()).add(path.name)
    return named


@pytest.mark.parametrize("row", ROWS)
def test_a_test_names_the_row(row):
    files = rows_named().get(row, set()) - {Path(__file__).name}
    assert files, f"no test's docstring names F{row}"
