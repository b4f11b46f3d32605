"""GGUF files: what is read equals the gguf package's reading, and damage is always named."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.files import ModelFileError
from jaxspec.weights.folder import ModelFiles
from jaxspec.weights.gguf import open_gguf
from jaxspec.weights.gguf_config import gguf_model_config
from tests.weights.folders import llama_gguf_tensors, write_gguf


def header(*, version=3, tensors=(), values=(), magic=b"GGUF") -> bytes:
    """A GGUF header by hand; tensors: (name, dims, kind, offset); values: (key, type, bytes)."""
    out = magic + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, kind, raw in values:
        out += text(key) + struct.pack("<I", kind) + raw
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", kind, offset)
    return out


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_tensors_read_as_the_gguf_package_reads_them(tmp_path, quantization):
    path = write_gguf(tmp_path / "m.gguf", llama_gguf_tensors(), quantization=quantization)
    file = open_gguf(path)
    reader = gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.tensors[tensor.name].read(), expected)


def test_a_tensor_of_several_chunks_reads_in_order(tmp_path):
    weights = np.arange(700 * 512, dtype=np.float32).reshape(700, 512)
    path = write_gguf(tmp_path / "m.gguf", {"big.weight": weights})
    np.testing.assert_array_equal(open_gguf(path).tensors["big.weight"].read(), weights)


def test_metadata_keeps_numbers_texts_and_arrays(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint64("a.u64", 2**40)
    writer.add_int32("a.i32", -3)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Ġ½")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    meta = open_gguf(tmp_path / "m.gguf").metadata
    assert meta["a.numbers"].tolist() == [1, 2, 3]
    del meta["a.numbers"]
    assert meta == {
        "general.architecture": "llama",
        "a.u64": 2**40,
        "a.i32": -3,
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "Ġ½",
        "a.texts": ["x", "", "yz"],
    }


def test_a_file_cut_anywhere_is_named_truncated(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", llama_gguf_tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 900, 7), *range(900, len(whole), 4999), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match="truncated or corrupt, fetch it again"):
            open_gguf(cut)


def test_a_header_with_any_byte_changed_opens_or_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", llama_gguf_tensors()).read_bytes()
    start = whole.index(b"blk.0.attn_norm") - 400
    damaged = tmp_path / "damaged.gguf"
    num_refused = 0
    for position in [*range(0, 200), *range(start, start + 400, 3)]:
        damaged.write_bytes(
            whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]
        )
        try:
            gguf_model_config(open_gguf(damaged))
        except ModelFileError as error:
            assert str(damaged) in str(error)
            num_refused += 1
    assert num_refused > 100


def test_a_file_that_shrinks_after_opening_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_gguf_tensors())
    tensor = list(open_gguf(path).tensors.values())[-1]
    path.write_bytes(path.read_bytes()[: tensor.offset + 8])
    with pytest.raises(ModelFileError, match=f"the file ends inside tensor {tensor.name}"):
        tensor.read()


F32, Q4_0, I8 = 0, 2, 24
DAMAGE = {
    "magic": (header(magic=b"GGML"), "starts with b'GGML', not b'GGUF'"),
    "version": (header(version=1), "GGUF version 1 .* not among the readable"),
    "big endian": (header(version=3 << 24), "GGUF version 50331648"),
    "short": (b"GGUF", "4 bytes are too few"),
    "split": (
        header(values=[("split.count", 2, struct.pack("<H", 3))]),
        "one of 3 parts of a split GGUF; merge them",
    ),
    "alignment": (
        header(values=[("general.alignment", 4, struct.pack("<I", 24))]),
        "alignment 24 is no power of two",
    ),
    "metadata type": (header(values=[("a", 99, b"")]), "unknown metadata type 99"),
    "no UTF-8": (
        header(values=[("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]),
        "is not UTF-8",
    ),
    "no dimension": (header(tensors=[("w", (), F32, 0)]), "w has 0 dimensions, not 1..4"),
    "tensor type": (header(tensors=[("w", (4,), 250, 0)]), "w has the unknown type 250"),
    "not numbers": (header(tensors=[("w", (4,), I8, 0)]) + bytes(64), "stored as I8, which cannot"),
    "part of a block": (
        header(tensors=[("w", (33,), Q4_0, 0)]) + bytes(64),
        r"shape \(33,\) is no whole number of Q4_0 blocks of 32",
    ),
    "past the end": (
        header(tensors=[("w", (1000,), F32, 0)]) + bytes(64),
        "w ends at byte 4064, the file at",
    ),
    "twice": (
        header(tensors=[("w", (4,), F32, 0), ("w", (4,), F32, 0)]) + bytes(128),
        "has tensor w twice",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_kind_of_damage_has_its_message(tmp_path, damage):
    content, message = DAMAGE[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content + bytes(24 if damage != "short" else 0))
    with pytest.raises(ModelFileError, match=message):
        open_gguf(path)


def test_a_missing_gguf_package_is_named_where_a_file_needs_it(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", llama_gguf_tensors())
    monkeypatch.delitem(sys.modules, "jaxspec.weights.gguf")
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelFileError, match=r"m\.gguf: needs gguf[^,]*, which is not installed"):
        open_checkpoint(ModelFiles("m", tmp_path, (path,)))


@pytest.mark.nightly
def test_what_reads_no_gguf_file_runs_without_the_package():
    """A bench of random weights, from a checkout on a machine that has jax and little else."""
    refuse = (
        "import sys; sys.modules['gguf'] = None\n"
        "from jaxspec.cli import main\n"
        "sys.exit(main('bench roofline --shape tiny --drafter none --batch 1 --context 16 "
        "--max-num-seqs 1 --max-model-len 512 --max-num-batched-tokens 256 --repeats 1 --json "
        "--no-compilation-cache'.split()))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", refuse],
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert '"mode": "roofline"' in ran.stdout
