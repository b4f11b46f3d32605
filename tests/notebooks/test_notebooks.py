"""The notebooks: small, valid, and every cell runs, on a tiny model and a CPU."""

import ast
import base64
import importlib
import os
import re
from pathlib import Path

import nbformat
import pytest

from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS, MAX_OUTPUT_BYTES = 15, 150_000
OURS = ("jaxspec", "kernels_pallas")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    """Sources of the code cells; lines for IPython alone become `pass`."""
    cells = nbformat.read(path, as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    return [re.sub(r"^(\s*)[!%].*", r"\1pass", source, flags=re.M) for source in sources]


def test_there_are_four():
    names = ["01_quickstart", "02_future_map", "03_kernels", "04_train_drafter"]
    assert [path.stem for path in NOTEBOOKS] == names


@every_notebook
def test_it_is_valid_and_small(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert len(notebook.cells) <= MAX_CELLS
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(nbformat.writes(nbformat.v4.new_notebook()) + str(outputs)) < MAX_OUTPUT_BYTES
    assert not [output for output in outputs if output.output_type == "error"]
    assert notebook.cells[0].cell_type == "markdown"
    assert "install.py" in notebook.cells[1].source
    assert "print(overview())" in notebook.cells[2].source


@every_notebook
def test_it_hides_no_helper_code(path):
    for source in code_cells(path):
        tree = ast.parse(source)
        helpers = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        assert not helpers, source


@every_notebook
def test_it_imports_what_there_is(path):
    imports = [
        (node.module, alias.name)
        for source in code_cells(path)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS
        for alias in node.names
    ]
    assert imports
    for module, name in imports:
        owner = importlib.import_module(module)
        if not hasattr(owner, name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.slow
@every_notebook
def test_every_cell_runs(path, tmp_path):
    from nbclient import NotebookClient

    write_tiny_model(tmp_path / "model")
    prompts = [f"{letter}{other} tell me" for letter in "abcd" for other in "qrstu"]
    (tmp_path / "model" / "prompts.txt").write_text("\n".join(prompts))
    env = {
        **os.environ,
        "HOME": str(tmp_path),  # where caches go
        "TMPDIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "JAXSPEC_TINY": str(tmp_path / "model"),
        "PYTHONPATH": str(ROOT),
    }
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=300, resources=resources)
    client.execute(env=env)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "\n".join(output.get("text", "") for output in outputs)
    assert "jaxspec is installed already" in text
    assert "not triton, since platform cpu is not a GPU" in text
    for expected in TEXTS[path.stem]:
        assert expected in text
    shown = [output.get("data", {}).get("image/png") for output in outputs]
    pictures = [base64.b64decode(data) for data in shown if data]
    assert len(pictures) == PICTURES[path.stem]
    assert all(len(picture) > 5_000 for picture in pictures)


TEXTS = {
    "01_quickstart": ["2 of 2 texts are equal, token for token"],
    "02_future_map": [
        "published  tokens [0 0 0 0]  lengths [ 1 12  1 40]",
        "stashed  tokens [  0 501   0  77]  lengths [ 1 12  1 40]",
        "read once:  [501  77] [12 40] errors [0 0]",
        "it was resolved twice without a stash between",
    ],
    "03_kernels": ["triton_interpret", "result.tokens: 1 of "],
    "04_train_drafter": ["untrained: 1 steps", "\ntrained: "],
}
PICTURES = {"01_quickstart": 2, "02_future_map": 1, "03_kernels": 3, "04_train_drafter": 2}
