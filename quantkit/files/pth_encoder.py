"""Write PyTorch's ``.pth`` as a stream of bytes that are equal for equal tensors.

`torch.save` and `zipfile` need all tensors at once or seek back, so this module writes the records.
The file is an uncompressed zip: ``NAME/data.pkl`` (a pickle of the dictionary whose tensors refer
to storages by number) and ``NAME/data/K``, the bytes of storage K. Sources: PyTorch's serialization
notes, PKWARE's APPNOTE for the zip records.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from quantkit.files.pickles import Reference, Storage
from quantkit.files.pth_io import FULL, LOCAL, LOCAL_SIGNATURE, TAIL, TAIL_SIGNATURE
from quantkit.files.tensor_file import StoredTensor, contiguous_strides
from quantkit.tensors.dtypes import DType

_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_ZIP64_TAIL = struct.Struct("<IQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<IIQI")
# The version of the zip format that first had sizes of 64 bits: 4.5.
_VERSION_ZIP64 = 45
# January 1st, the first day that the format can express.
_DATE_1980 = 0x21
# "FB": the id of the field with which torch pads headers.
_PADDING_ID = 0x4246
# As torch aligns storages.
_ALIGNMENT = 64

_STORAGES = {
    DType.FLOAT32: "FloatStorage",
    DType.FLOAT16: "HalfStorage",
    DType.BFLOAT16: "BFloat16Storage",
}


class PthEncoder:
    """The bytes of one ``.pth`` file in the order in which they are appended; names and dates
    are fixed.
    """

    def __init__(self, name: str, tensors: Sequence[StoredTensor]) -> None:
        self._name = name
        self._tensors = tensors
        self._records: list[tuple[str, int, int, int]] = []
        self._position = 0

    @property
    def total_bytes(self) -> int:
        """Compute an upper bound on the finished file's size."""
        # Each record has a header, its padding, and an entry in the directory.
        records = sum(tensor.nbytes + 2 * (_ALIGNMENT + 128) for tensor in self._tensors)
        return records + len(_pickle_tensors(self._tensors)) + 4096

    def state(self) -> dict[str, Any]:
        """Save as JSON what `restore` needs to continue after the bytes so far."""
        return {"records": self._records, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where another encoder saved its `state`."""
        self._records = []
        for name, checksum, size, position in state["records"]:
            self._records.append((str(name), int(checksum), int(size), int(position)))
        self._position = int(state["position"])

    def start(self) -> bytes:
        """Encode everything before the first tensor."""
        # The records that torch writes, in its order.
        records = {
            "data.pkl": _pickle_tensors(self._tensors),
            ".format_version": b"1",
            ".storage_alignment": str(_ALIGNMENT).encode(),
            "byteorder": b"little",
        }
        encoded = b""
        for name, data in records.items():
            encoded += self._record(name, data) + data
        return encoded

    def before(self, index: int, data: memoryview) -> bytes:
        """Encode the zip header that precedes the data of tensor `index`."""
        return self._record(f"data/{index}", data)

    def end(self) -> bytes:
        """Encode everything after the last tensor."""
        tail = self._record("version", b"3\n") + b"3\n"
        start = self._position
        directory = b""
        for name, checksum, size, position in self._records:
            encoded = name.encode()
            # Sizes and position in 64 bits; the fields of 32 bits are `FULL`.
            extra = struct.pack("<HHQQQ", 1, 24, size, size, position)
            directory += (
                _CENTRAL.pack(
                    0x02014B50,
                    _VERSION_ZIP64,
                    _VERSION_ZIP64,
                    0,
                    0,
                    0,
                    _DATE_1980,
                    checksum,
                    FULL,
                    FULL,
                    len(encoded),
                    len(extra),
                    0,
                    0,
                    0,
                    0,
                    FULL,
                )
                + encoded
                + extra
            )
        count = len(self._records)
        tail += directory + _ZIP64_TAIL.pack(
            0x06064B50,
            # Without the signature and this field.
            _ZIP64_TAIL.size - 12,
            _VERSION_ZIP64,
            _VERSION_ZIP64,
            0,
            0,
            count,
            count,
            len(directory),
            start,
        )
        tail += _ZIP64_LOCATOR.pack(0x07064B50, 0, start + len(directory), 1)
        return tail + TAIL.pack(
            TAIL_SIGNATURE, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), FULL, FULL, 0
        )

    def _record(self, record: str, data: bytes | memoryview) -> bytes:
        """Encode the local header of the next record, padded so that the data after it is
        aligned.
        """
        name = f"{self._name}/{record}".encode()
        checksum = zlib.crc32(data)
        zip64 = struct.pack("<HHQQ", 1, 16, len(data), len(data))
        # 4 bytes for the id and the length of the padding itself.
        padding = -(self._position + LOCAL.size + len(name) + len(zip64) + 4) % _ALIGNMENT
        extra = zip64 + struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding
        self._records.append((name.decode(), checksum, len(data), self._position))
        header = LOCAL.pack(
            LOCAL_SIGNATURE,
            _VERSION_ZIP64,
            0,
            0,
            0,
            _DATE_1980,
            checksum,
            FULL,
            FULL,
            len(name),
            len(extra),
        )
        self._position += len(header) + len(name) + len(extra) + len(data)
        return header + name + extra


class _Pickler(pickle.Pickler):
    """Pickles a `Reference` as the call that rebuilds its tensor, and a `Storage` as its number."""

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if not isinstance(obj, Storage):
            return None
        # The tuple in which torch pickles a storage.
        return "storage", getattr(torch, _STORAGES[obj.dtype]), obj.key, "cpu", obj.count

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Reference):
            return NotImplemented
        # Storage, offset, shape, strides, requires_grad and hooks.
        arguments: tuple[Any, ...] = (
            obj.storage,
            obj.offset,
            obj.shape,
            obj.stride,
            False,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, arguments


def _pickle_tensors(tensors: Sequence[StoredTensor]) -> bytes:
    values = {}
    for index, tensor in enumerate(tensors):
        storage = Storage(str(index), tensor.dtype, math.prod(tensor.shape))
        values[tensor.name] = Reference(
            storage=storage,
            dtype=tensor.dtype,
            offset=0,
            shape=tensor.shape,
            stride=contiguous_strides(tensor.shape),
        )
    buffer = io.BytesIO()
    # Protocol 2, as torch.save.
    _Pickler(buffer, protocol=2).dump(values)
    return buffer.getvalue()
