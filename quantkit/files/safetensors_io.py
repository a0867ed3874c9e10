"""Read and strictly validate the header of a safetensors file, and build the header to write.

The safetensors library maps files into memory, so a file that is truncated later would kill the
process; it also accepts duplicate keys.

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
    check_size,
    check_sizes,
    contiguous_strides,
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
# The limit of the safetensors library.
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
    # Before the header is read, as the length may be any number in another kind of file.
    if not 0 < length <= min(source.size - 8, _MAX_HEADER):
        raise make_damaged_file_error(
            "is not a safetensors file, or is truncated",
            path,
            f"a header of {length} bytes in a file of {source.size}",
            f"at most {_MAX_HEADER}",
        )
    try:
        header = json.loads(
            source.read(8, length).decode(), object_pairs_hook=_refuse_duplicate_keys
        )
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ has values that are not strings")
        entries = [_parse_entry(name, entry) for name, entry in header.items()]
        # By first and last byte: the JSON object may have any order.
        entries.sort(key=lambda entry: entry[:2])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"has an invalid safetensors header: {error!r:.200}", path=path
        ) from error
    views = {}
    position = 0
    available = source.size - 8 - length
    for begin, end, name, dtype, shape in entries:
        require_adjacent(name, begin, position, path)
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor '{name}' has an unknown dtype", path=path, found=dtype[:80]
            )
        view = View(DTYPES[dtype], 8 + length + begin, shape, contiguous_strides(shape))
        if end - begin != view.nbytes:
            raise CheckpointError(
                f"tensor '{name}' has the wrong size",
                path=path,
                found=f"{end - begin} bytes",
                expected=view.nbytes,
            )
        views[name] = view
        position = end
    if position != available:
        if position > available:
            problem = "is truncated"
        else:
            problem = "has bytes after its last tensor"
        raise make_damaged_file_error(problem, path, f"{available} bytes of data", position)
    return TensorFile(source, views, metadata=metadata or {})


def require_readable(path: Path) -> None:
    """Open a file that was just written with the safetensors library, as other readers do.

    Raises:
        RuntimeError: if it finds other tensors than `open_file`: a bug of quantkit.
    """
    handle: Any
    library_shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(path, framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118
            library_shapes[name] = tuple(handle.get_slice(name).get_shape())
    shapes = {name: tensor.shape for name, tensor in open_file(path).tensors.items()}
    if library_shapes != shapes:
        raise RuntimeError(
            f"the safetensors library and quantkit read different tensors from {path}"
        )


def _parse_entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Parse a tensor's entry in a header: its first byte and the one after its last, its name,
    dtype and shape.
    """
    # Half of a surrogate pair raises here; a message with it could not be printed.
    name.encode()
    begin, end = map(check_size, entry["data_offsets"])
    return begin, end, name, str(entry["dtype"]), check_sizes(entry["shape"])


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, and refuse duplicate keys, of which Python's parser keeps the last."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        values[key] = value
    return values


def build_header(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build the bytes before the data: length and JSON, padded so that the data is aligned.

    Args:
        metadata: of the file, in the order in which it is written; by default the framework alone.

    Raises:
        UnsupportedError: for a dtype that the format does not have.
    """
    # Some versions of transformers refuse a file that does not name its framework.
    if metadata is None:
        metadata = {"format": "pt"}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        if tensor.dtype not in _SPELLINGS:
            raise UnsupportedError(
                f"safetensors cannot store tensor '{tensor.name}'", found=tensor.dtype
            )
        end = position + tensor.nbytes
        dtype = _SPELLINGS[tensor.dtype]
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the JSON.
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
