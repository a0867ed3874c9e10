"""The safetensors file: a strictly validated header, and the header to write. The safetensors
library maps files into memory, so a file that is truncated later would kill the process; it also
accepts duplicate keys.

Source: the safetensors format description (8-byte length, JSON header, one buffer).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.source import make_damaged_file_error, open_weights, require_adjacent
from quantkit.files.tensor_file import (
    StoredTensor,
    TensorFile,
    View,
    contiguous_strides,
    size_number,
    sizes,
)
from quantkit.tensors.dtypes import DType

DTYPES = {
    "F64": DType.FLOAT64,
    "F32": DType.FLOAT32,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "I64": DType.INT64,
    "I32": DType.INT32,
    "I16": DType.INT16,
    "I8": DType.INT8,
    "U8": DType.UINT8,
    "U64": DType.UINT64,
    "U32": DType.UINT32,
    "U16": DType.UINT16,
    "C64": DType.COMPLEX64,
    "BOOL": DType.BOOL,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E4M3FNUZ": DType.FLOAT8_E4M3FNUZ,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "F8_E5M2FNUZ": DType.FLOAT8_E5M2FNUZ,
    "F8_E8M0": DType.FLOAT8_E8M0FNU,
}
_SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
_ALIGNMENT = 64


def open_file(path: Path) -> TensorFile:
    """Open a file and validate its header; no data is read.

    Raises:
        CheckpointError: if it is a placeholder or malformed: an invalid header length, invalid
            JSON, unknown dtypes, overlapping or non-contiguous offsets, too few or too many bytes.
    """
    source = open_weights(path)
    prefix = source.read(0, min(source.size, 8))
    if len(prefix) == 8:
        length = struct.unpack("<Q", prefix)[0]
    else:
        length = -1
    if not 0 < length <= min(source.size - 8, _MAX_HEADER):
        found = f"a header of {length} bytes in a file of {source.size}"
        raise make_damaged_file_error(
            "is not a safetensors file, or is truncated", path, found, f"at most {_MAX_HEADER}"
        )
    try:
        header = json.loads(source.read(8, length).decode(), object_pairs_hook=_distinct)
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ holds other values than strings")
        listed = sorted(
            (_parse_entry(name, entry) for name, entry in header.items()), key=lambda item: item[:2]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"has an invalid safetensors header: {error!r:.200}", path=path
        ) from error
    views = {}
    position = 0
    available = source.size - 8 - length
    for begin, end, name, dtype, shape in listed:
        require_adjacent(name, begin, position, path)
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor '{name}' has an unknown dtype", path=path, found=dtype[:80]
            )
        view = View(DTYPES[dtype], 8 + length + begin, shape, contiguous_strides(shape))
        if end - begin != view.nbytes:
            problem = f"tensor '{name}' has the wrong size"
            found = f"{end - begin} bytes"
            raise CheckpointError(problem, path=path, found=found, expected=view.nbytes)
        views[name], position = view, end
    if position != available:
        if position > available:
            what = "is truncated"
        else:
            what = "has bytes after its last tensor"
        raise make_damaged_file_error(what, path, f"{available} bytes of data", position)
    return TensorFile(source, views, metadata=metadata or {})


def require_readable(path: Path) -> None:
    """Open a file that was just written with the safetensors library, as other readers do.

    Raises:
        RuntimeError: if it finds other tensors than `open_file`: a bug of quantkit.
    """
    handle: Any
    with safe_open(path, framework="pt") as handle:
        theirs = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    if theirs != {name: tensor.shape for name, tensor in open_file(path).tensors.items()}:
        raise RuntimeError(f"the safetensors library reads other tensors from {path} than quantkit")


def _parse_entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Return the first byte of a tensor and the one after its last, its name, dtype and shape, from
    its entry in a header.
    """
    # Half of a surrogate pair would not print.
    name.encode()
    begin, end = map(size_number, entry["data_offsets"])
    return begin, end, name, str(entry["dtype"]), sizes(entry["shape"])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r:.80} comes twice")
        result[key] = value
    return result


def build_header(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes before the data: length and JSON, padded so that the data is aligned.

    Args:
        metadata: of the file, in the order in which it is written; by default the framework alone.

    Raises:
        UnsupportedError: for a dtype that the format does not have.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"} if metadata is None else dict(metadata)
    }
    position = 0
    for tensor in tensors:
        if tensor.dtype not in _SPELLINGS:
            raise UnsupportedError(
                f"safetensors cannot hold tensor '{tensor.name}'", found=tensor.dtype
            )
        end = position + tensor.nbytes
        dtype = _SPELLINGS[tensor.dtype]
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
