"""Imports point one way, and host-only files import no jax, so that they cannot wait for it."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = "kernels_pallas"

# Each layer may import its own and those before it, as `architecture.md` orders them. A name
# stands for the module and everything below it; the longest that fits decides.
LAYERS = [
    [KERNELS],
    [
        "jaxspec.checks",
        "jaxspec.interrupts",
        "jaxspec.config",
        "jaxspec.mode",
        "jaxspec.threefry",
        "jaxspec.request",
        "jaxspec.grammar",
        "jaxspec.tokenizer",
        "jaxspec.chat_template",
        "jaxspec.detokenizer",
        "jaxspec.models.config",
        "jaxspec.drafters.dflash_config",
        "jaxspec.weights",
    ],
    [
        "jaxspec.future_map",
        "jaxspec.sampling",
        "jaxspec.logit_edits",
        "jaxspec.rejection",
        "jaxspec.logprobs",
        "jaxspec.cache",
        "jaxspec.models",
        "jaxspec.drafters.dflash_params",
        "jaxspec.weights.load",
    ],
    ["jaxspec.drafters", "jaxspec.verify"],
    [
        "jaxspec.engine.state",
        "jaxspec.engine.tree_step",
        "jaxspec.engine.edits",
        "jaxspec.engine.choose",
        "jaxspec.engine.decode_step",
        "jaxspec.engine.staged_step",
        "jaxspec.engine.prefill_step",
    ],
    ["jaxspec.engine.steps"],
    ["jaxspec.engine"],
    ["jaxspec.llm"],
    [
        "jaxspec.cli",
        "jaxspec.commands",
        "jaxspec.server",
        "jaxspec.bench",
        "jaxspec.pictures",
        "jaxspec.training",
        "jaxspec.__main__",
    ],
]
# A file that no layer names helps the surfaces: they may import it, the engine may not.
SURFACE = LAYERS.index(["jaxspec.llm"])

# What the engine's host loop is made of, and what reads text; none of it may touch the device.
HOST_ONLY = [
    "jaxspec.checks",
    "jaxspec.interrupts",
    "jaxspec.config",
    "jaxspec.mode",
    "jaxspec.threefry",
    "jaxspec.copies",
    "jaxspec.request",
    "jaxspec.grammar",
    "jaxspec.engine.allowed",
    "jaxspec.tokenizer",
    "jaxspec.detokenizer",
    "jaxspec.chat_template",
    "jaxspec.cache.page_pool",
    "jaxspec.cache.prefix_tree",
    "jaxspec.engine.pace",
    "jaxspec.weights.files",
    "jaxspec.weights.safetensors",
    "jaxspec.weights.mapping",
    "jaxspec.models.config",
    "jaxspec.drafters.dflash_config",
    "jaxspec.drafters.eagle_config",
    "jaxspec.drafters.multi_layer_eagle_config",
    "jaxspec.engine.draft_input",
    "jaxspec.engine.sequence",
    "jaxspec.engine.commit",
    "jaxspec.engine.logprob_output",
]
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "chex", "kernels_pallas"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources():
    return {
        module_name(path): path
        for package in ("jaxspec", KERNELS)
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imports_of(path):
    """Absolute names of all modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in sources() else node.module


def layer_of(module):
    """Index of the layer whose longest name holds the module."""
    fits = [
        (len(name), index)
        for index, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    return max(fits)[1] if fits else SURFACE


def test_imports_point_one_way():
    wrong = []
    for module, path in sources().items():
        for imported in imports_of(path):
            inside = imported.split(".")[0] in ("jaxspec", KERNELS)
            if inside and layer_of(imported) > layer_of(module):
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def test_the_kernels_stand_alone():
    for module, path in sources().items():
        if module.startswith(KERNELS):
            assert not [name for name in imports_of(path) if name.startswith("jaxspec")], module


@pytest.mark.parametrize("module", HOST_ONLY)
def test_host_only_files_import_no_jax(module):
    """Not even through another file of ours."""
    known, seen, queue = sources(), set(), [module]
    while queue:
        name = queue.pop()
        for imported in imports_of(known[name]):
            assert imported.split(".")[0] not in DEVICE_LIBRARIES, f"{name} imports {imported}"
            if imported in known and imported not in seen:
                seen.add(imported)
                queue.append(imported)


def test_imports_inside_functions_are_seen(tmp_path):
    source = tmp_path / "late.py"
    source.write_text("import os\ndef f():\n    from jaxspec.engine import engine\n")
    assert list(imports_of(source)) == ["os", "jaxspec.engine.engine"]
