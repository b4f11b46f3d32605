"""safetensors files: what is read equals the package's reading, and damage is always named."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.weights.files import ModelFileError
from jaxspec.weights.safetensors import open_safetensors

FETCH_AGAIN = "truncated or corrupt, fetch it again"


def save(path, tensors):
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "f32": rng.standard_normal((700, 300), dtype=np.float32),
        "f16": rng.standard_normal((5, 7)).astype(np.float16),
        "bf16": rng.standard_normal((3, 4, 5)).astype(ml_dtypes.bfloat16),
        "i64": np.arange(9),
        "scalar": np.array(3.5, np.float32),
    }


def raw_file(path, header: bytes, data: bytes = b""):
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_tensors_read_as_the_safetensors_package_reads_them(tmp_path):
    path = save(tmp_path / "m.safetensors", some_tensors())
    tensors = open_safetensors([path])
    expected = load_file(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.read().dtype == expected[name].dtype
        np.testing.assert_array_equal(tensor.read(), expected[name])


def test_values_are_converted_while_read(tmp_path):
    values = np.array([1.0, 1.00390625, -3.0e38], np.float32)
    tensor = open_safetensors([save(tmp_path / "m.safetensors", {"w": values})])["w"]
    out = np.empty(3, ml_dtypes.bfloat16)
    tensor.read_into(out)
    np.testing.assert_array_equal(out, values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("value", [1e5, np.inf, np.nan])
def test_a_value_outside_float16_names_the_tensor_and_the_limit(tmp_path, value):
    values = np.array([1.0, value], np.float32)
    tensor = open_safetensors([save(tmp_path / "m.safetensors", {"w": values})])["w"]
    with pytest.raises(ModelFileError, match=r"tensor w holds .*, float16 ends at 65504; choose"):
        tensor.read_into(np.empty(2, np.float16))


def test_a_file_cut_anywhere_is_named_truncated(tmp_path):
    small = {name: value for name, value in some_tensors().items() if name != "f32"}
    whole = save(tmp_path / "whole.safetensors", small).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=FETCH_AGAIN):
            open_safetensors([cut])


def test_a_tensor_in_two_files_is_refused(tmp_path):
    first = save(tmp_path / "a.safetensors", {"w": np.zeros(3, np.float32)})
    second = save(tmp_path / "b.safetensors", {"w": np.zeros(3, np.float32)})
    with pytest.raises(ModelFileError, match=r"b.safetensors: holds w, and so does a.safetensors"):
        open_safetensors([first, second])


def entry(start, stop, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


DAMAGE = {
    "pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1", "cannot hold a header"),
    "nested": ("[" * 10**5, "no safetensors header .*Recursion"),
    "no JSON": (None, "the header is no safetensors header"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "no safetensors header .*shape"),
    "a list": ([1, 2], "no safetensors header"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 20)}, "byte 8 of the data has no one owner"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, "byte 8 of the data has no one owner"),
    "size": (
        {"w": entry(0, 8, shape=(3,))},
        r"tensor w of shape \(3,\) and type F32 has 8 bytes",
    ),
    "FP8": ({"w": entry(0, 2, "F8_E4M3")}, "stored as F8_E4M3, which jaxspec cannot read; use"),
    "data left over": ({"w": entry(0, 8)}, "the data should end at byte .*, the file ends at"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_kind_of_damage_has_its_message(tmp_path, damage):
    header, message = DAMAGE[damage]
    path = tmp_path / "damaged.safetensors"
    if isinstance(header, bytes):
        path.write_bytes(header)
    elif isinstance(header, str):
        raw_file(path, header.encode())
    else:
        raw = b"{not json" if header is None else json.dumps(header).encode()
        raw_file(path, raw, bytes(64))
    with pytest.raises(ModelFileError, match=message):
        open_safetensors([path])
