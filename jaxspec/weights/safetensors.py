"""Reads safetensors files: names, shapes and byte ranges, checked before anything is believed.

The header is parsed here, since the `safetensors` package maps the whole file, and mapped pages
count as resident memory while weights stream through.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.weights.files import ModelFileError, StoredTensor

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("<i1"),
    "U8": np.dtype("<u1"),
    "BOOL": np.dtype("?"),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FETCH_AGAIN = "it is truncated or corrupt, fetch it again"


def open_safetensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Lists the tensors of one checkpoint, which may be spread over several files.

    Raises:
        ModelFileError: a file is truncated or corrupt, holds a type that jaxspec cannot read
            (FP8), or two files hold the same tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for tensor in _tensors_of(path):
            if tensor.name in tensors:
                raise ModelFileError(
                    path,
                    f"holds {tensor.name}, and so does {tensors[tensor.name].file.name}",
                    "keep the files of one checkpoint only in the folder",
                )
            tensors[tensor.name] = tensor
    return tensors


def _tensors_of(path: Path) -> Iterable[StoredTensor]:
    file_size = path.stat().st_size
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if file_size < 8 or header_size > min(MAX_HEADER_BYTES, file_size - 8):
            raise ModelFileError(
                path,
                f"{file_size} bytes cannot hold a header of {header_size}",
                f"{_FETCH_AGAIN} (a Git LFS pointer looks like this, too)",
            )
        raw = file.read(header_size)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ranges = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        tensors = [
            _stored_tensor(path, name, entry, 8 + header_size) for name, entry in entries.items()
        ]
    except ModelFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            path, f"the header is no safetensors header ({error!r})", _FETCH_AGAIN
        ) from None
    end = 0
    for start, stop in ranges:
        if start != end:
            raise ModelFileError(path, f"byte {end} of the data has no one owner", _FETCH_AGAIN)
        end = stop
    if end != file_size - 8 - header_size:
        raise ModelFileError(
            path,
            f"the data should end at byte {8 + header_size + end}, the file ends at {file_size}",
            _FETCH_AGAIN,
        )
    return tensors


def _stored_tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ModelFileError(
            path,
            f"tensor {name} is stored as {entry['dtype']}, which jaxspec cannot read",
            "use a checkpoint in bfloat16, float16 or float32",
        )
    dtype = DTYPES[entry["dtype"]]
    if min(shape, default=1) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ModelFileError(
            path,
            f"tensor {name} of shape {shape} and type {entry['dtype']} has {stop - start} bytes",
            _FETCH_AGAIN,
        )
    return StoredTensor(
        name=name,
        shape=shape,
        dtype=entry["dtype"],
        file=path,
        offset=data_start + start,
        num_bytes=stop - start,
        value_dtype=dtype,
        decode=lambda raw: raw.view(dtype),
    )
