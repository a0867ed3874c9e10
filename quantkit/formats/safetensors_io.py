"""The safetensors file: a strictly checked header, lazy reads, and the header to write.

Source: the safetensors format description (8-byte length, JSON header, one buffer).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.sniff import require_weights

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
_ALIGNMENT = 64


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors header lists it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check a header without touching the data.

    Raises:
        CheckpointError: for anything but a well-formed file: stand-ins for weights, an
            absurd header length, invalid JSON, unknown dtypes, overlapping or
            non-contiguous offsets, too few or too many bytes.
    """
    require_weights(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                "is not a safetensors file, or is truncated", path=path,
                found=f"a header of {length} bytes in a file of {size}", expected=f"at most {_MAX_HEADER}",
                hint="download it again",
            )  # fmt: skip
        raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ holds other values than strings")
        listed = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors = _checked(listed, path, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"has an invalid safetensors header: {error!r}", path=path) from error
    return tensors


def _checked(listed: list[tuple[str, Any]], path: Path, available: int) -> dict[str, StoredTensor]:
    position = 0
    tensors: dict[str, StoredTensor] = {}
    for name, entry in listed:
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"tensor '{name}' has an unknown dtype", path=path, found=entry["dtype"])
        tensor = StoredTensor(name, DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
        begin, end = entry["data_offsets"]
        if begin != position:
            what = "overlaps another" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"tensor '{name}' {what}", path=path, found=f"offset {begin}", expected=position)
        if end - begin != tensor.nbytes:
            raise CheckpointError(
                f"tensor '{name}' has the wrong size", path=path, found=f"{end - begin} bytes", expected=tensor.nbytes
            )
        tensors[name] = tensor
        position = end
    if position != available:
        what = "is truncated" if position > available else "has bytes after its last tensor"
        raise CheckpointError(
            what, path=path, found=f"{available} bytes of data", expected=position, hint="download it again"
        )
    return tensors


def build_header(tensors: Sequence[StoredTensor]) -> bytes:
    """The bytes before the data: length and JSON, padded so that the data is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": _SPELLINGS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def open_mapped(path: Path) -> Callable[[str], Tensor]:
    """Map a file; the result gives any tensor as a view, read only when touched."""
    handle: Any = safe_open(path, framework="pt", device="cpu")

    def get(name: str) -> Tensor:
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    return get
