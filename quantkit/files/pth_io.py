"""The files of `torch.save`: where each tensor is; nothing in the file is executed.

Since torch 1.6 a file is an uncompressed zip: ``NAME/data.pkl`` (a pickle of the dictionary, whose tensors refer to
storages by key) and ``NAME/data/KEY``, the bytes of a storage. Before, it was five pickles (a magic number, a version,
the writer's system, the dictionary, the keys of the storages) and then each storage, after its number of elements in
eight bytes.
Source: PyTorch's serialization notes and ``torch/serialization.py``.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.pickles import MAX_BYTES, Other, Reference, Unpickler, damaged
from quantkit.files.source import SourceFile, damaged_file, open_weights
from quantkit.files.tensor_file import TensorFile, View
from quantkit.files.zip_records import ZipRecords, has_directory

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of files before the zip
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_TAIL_BYTES = 22
_NOTE_BYTES = 4096
_FULL = 0xFFFFFFFF
_TAR = (257, b"ustar")


def open_file(path: Path) -> TensorFile:
    """Open a file of named tensors; their data is not read.

    Raises:
        CheckpointError: for placeholders, truncation, records that contradict each other, a pickle that is no flat
            dictionary of tensors, or one that would run code.
        UnsupportedError: for compressed records, tensors other than plain ones, and files written on big-endian
            machines or by torch before 0.2.
    """
    source = open_weights(path)
    if source.read(0, min(source.size, 4)) == b"PK\x03\x04":
        return _open_zip(source)
    if source.read(min(source.size, _TAR[0]), min(max(source.size - _TAR[0], 0), len(_TAR[1]))) == _TAR[1]:
        raise UnsupportedError(
            "is a tar archive, as torch wrote it before version 0.2", path=path,
            hint="load it with torch and save it again",
        )  # fmt: skip
    return _open_legacy(source)


def _open_zip(source: SourceFile) -> TensorFile:
    path = source.path
    if not has_directory(source):
        raise damaged_file("is truncated", path, f"{source.size} bytes", f"at least {_expected_size(source)} bytes")
    records = ZipRecords(source)
    top = next(iter(records.names()), "").partition("/")[0]
    raw = records.read(f"{top}/data.pkl", MAX_BYTES)
    _check_notes(records, top, path)
    unpickler = Unpickler(io.BytesIO(raw), path)
    tensors = _named_tensors(unpickler.load(), path)
    starts = {}
    for key, storage in unpickler.storages.items():
        record = records.stored(f"{top}/data/{key}")
        if record.size != storage.nbytes:
            raise damaged_file(
                f"record '{record.name}' has the wrong size", path, f"{record.size} bytes", storage.nbytes
            )
        starts[key] = record.start
    source.checksums = records.checksums or ()
    unchecked = f"{path}: was written without checksums, so damage to its weights cannot be detected"
    return TensorFile(source, _views(tensors, starts), () if records.checksums is not None else (unchecked,))


def _check_notes(records: ZipRecords, top: str, path: Path) -> None:
    """Check the small records besides the pickle and the storages, some of which say how the file was written."""
    found = {}
    for name in records.names():
        folder, _, rest = name.partition("/")
        if folder != top or not rest:
            raise damaged_file(f"record '{name}' is not in the folder '{top}'", path)
        if rest != "data.pkl" and not rest.startswith("data/"):
            found[rest] = records.read(name, _NOTE_BYTES)
    _require_little_endian(found.get("byteorder", b"little") == b"little", path)
    if not {"version", ".data/version"} & set(found):
        raise damaged_file(f"record '{top}/version' is missing", path)
    for rest in {".storage_alignment", ".format_version", "version"} & set(found):
        if not found[rest].strip().isdigit():
            raise CheckpointError(f"record '{top}/{rest}' is damaged", path=path, found=repr(found[rest][:40]))


def _open_legacy(source: SourceFile) -> TensorFile:
    path = source.path
    head = io.BytesIO(source.read(0, min(source.size, MAX_BYTES)))
    unpickler = Unpickler(head, path)
    magic = unpickler.load()
    if magic != _MAGIC or unpickler.load() != _VERSION:
        raise damaged(path, ValueError("torch.save did not write it"))
    system = unpickler.load()
    _require_little_endian(isinstance(system, dict) and system.get("little_endian") is True, path)
    tensors = _named_tensors(unpickler.load(), path)
    keys = unpickler.load()
    if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
        raise damaged(path, ValueError("it does not list its storages"))
    if sorted(map(str, keys)) != sorted(unpickler.storages):
        raise damaged(path, ValueError("its storages are not those that its tensors refer to"))
    starts = {}
    position = head.tell()
    for key in map(str, keys):
        storage = unpickler.storages[key]
        end = position + 8 + storage.nbytes
        if end > source.size:
            raise damaged_file("cannot be read: it is truncated", path, f"{source.size} bytes", f"at least {end}")
        (count,) = struct.unpack("<q", source.read(position, 8))
        if count != storage.count:
            raise damaged_file(f"storage '{key}' has the wrong size", path, f"{count} elements", storage.count)
        starts[key] = position + 8
        position = end
    return TensorFile(source, _views(tensors, starts))


def _require_little_endian(holds: bool, path: Path) -> None:
    if not holds:
        raise UnsupportedError(
            "was not written on a little-endian machine", path=path, hint="load it with torch and save it again"
        )


def _named_tensors(value: Any, path: Path) -> dict[str, Reference]:
    """The dictionary of tensors in a pickle."""
    if isinstance(value, dict) and set(value) == {"model"} and isinstance(value["model"], dict):
        value = value["model"]
    if not isinstance(value, dict) or not value:
        raise CheckpointError("does not hold a dictionary of tensors", path=path, found=type(value).__name__)
    for name, tensor in value.items():
        if isinstance(name, str) and isinstance(tensor, Other):
            raise UnsupportedError(f"entry {name!r:.80} is no plain tensor", path=path, found=tensor.name)
        if not isinstance(name, str) or not isinstance(tensor, Reference):
            raise CheckpointError(f"entry {name!r:.80} is no tensor", path=path, found=type(tensor).__name__)
    return value


def _views(tensors: Mapping[str, Reference], starts: Mapping[str, int]) -> dict[str, View]:
    return {
        name: View(t.dtype, starts[t.storage.key] + t.offset * t.dtype.itemsize, t.shape, t.stride)
        for name, t in tensors.items()
    }


def _expected_size(source: SourceFile) -> int:
    """The minimum size of a zip before it was truncated, from the pickle and the remaining records.

    torch.save writes a record's size after its data, so only the pickle, which comes first, has the storages' sizes.
    """
    size, position = source.size, 0
    while position + _LOCAL.size <= source.size:
        fields = _LOCAL.unpack(source.read(position, _LOCAL.size))
        start = position + _LOCAL.size + fields[9] + fields[10]
        if fields[0] != 0x04034B50 or start > source.size:
            break
        if position == 0:
            pickled = io.BytesIO(source.read(start, min(source.size - start, MAX_BYTES)))
            unpickler = Unpickler(pickled, source.path)
            with contextlib.suppress(CheckpointError):
                unpickler.load()
            size = max(size, sum(storage.nbytes for storage in unpickler.storages.values()))
        extra = source.read(start - fields[10], fields[10])
        length = fields[8]
        if length == _FULL and extra[:2] == b"\x01\x00" and len(extra) >= 12:
            length = struct.unpack("<Q", extra[4:12])[0]
        position = start + length
    return max(position + _TAIL_BYTES, size + 1)
