"""Find each tensor in the files of `torch.save`; nothing in the file is executed.

Since torch 1.6 a file is an uncompressed zip: ``NAME/data.pkl`` (a pickle of the dictionary, whose
tensors refer to storages by key) and ``NAME/data/KEY``, the bytes of a storage. Before, it was five
pickles (a magic number, a version, the writer's system, the dictionary, the keys of the storages)
and then each storage, after its number of elements in eight bytes. `zipfile` trusts the directory
of a zip file and other readers the headers of its records, so one file could hold two models. This
module compares both. Sources: PyTorch's serialization notes and ``torch/serialization.py``,
PKWARE's APPNOTE.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.pickles import MAX_BYTES, Other, Reference, Unpickler, make_unreadable_error
from quantkit.files.source import Checksum, SourceFile, make_damaged_file_error, open_weights
from quantkit.files.tensor_file import TensorFile, View

# Of files from before torch used zip.
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_NOTE_BYTES = 4096
# Offset and content of a tar archive's signature.
_TAR = (257, b"ustar")
LOCAL = struct.Struct("<IHHHHHIIIHH")
LOCAL_SIGNATURE = 0x04034B50
# A directory entry: its lengths, and its disk.
_CENTRAL = struct.Struct("<I24xHHHH10x")
_CENTRAL_SIGNATURE = 0x02014B50
# MS-DOS's attribute of a folder. Some readers read no content of such a record.
_IS_FOLDER = 0x10
# After the directory: its disks, its entries (on this disk, in all), its length and its offset.
TAIL = struct.Struct("<IHHHHIIH")
TAIL_SIGNATURE = 0x06054B50
_LOCATOR = struct.Struct("<4xIQI")
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_WIDE_TAIL = struct.Struct("<16xIIQQQQ")
# In a field of 32 bits: the value is in a field of 64 bits elsewhere.
FULL = 0xFFFFFFFF
# Flags of a record: the sizes are after its data; its name is in UTF-8.
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800
# Encrypted in one of three ways, or a patch of another record.
_ALTERED = 0x2061
_DAMAGE = (
    zipfile.BadZipFile,
    NotImplementedError,
    struct.error,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    EOFError,
    MemoryError,
    OSError,
)


def open_file(path: Path) -> TensorFile:
    """Open a file of named tensors; their data is not read.

    Raises:
        CheckpointError: for placeholders, truncation, records that contradict each other, a pickle
            that is no flat dictionary of tensors, or one that would run code.
        UnsupportedError: for compressed records, tensors other than plain ones, and files written
            on big-endian machines or by torch before 0.2.
    """
    source = open_weights(path)
    if source.read(0, min(source.size, 4)) == b"PK\x03\x04":
        return _open_zip(source)
    tar_offset, tar_signature = _TAR
    start = min(source.size, tar_offset)
    length = min(source.size - start, len(tar_signature))
    if source.read(start, length) == tar_signature:
        raise _make_unsupported_error(
            "is a tar archive, as written by torch before version 0.2", path
        )
    return _open_legacy(source)


def _open_zip(source: SourceFile) -> TensorFile:
    path = source.path
    try:
        complete = zipfile.is_zipfile(source.stream())
    except _DAMAGE as error:
        raise make_unreadable_error(path, error) from error
    if not complete:
        raise make_damaged_file_error(
            "is truncated",
            path,
            f"{source.size} bytes",
            f"at least {_estimate_full_size(source)} bytes",
        )
    records = ZipRecords(source)
    # torch names the folder of all records after the file to which it saved them.
    top = next(iter(records.records), "").partition("/")[0]
    raw = records.read(f"{top}/data.pkl", MAX_BYTES)
    _check_small_records(records, top, path)
    unpickler = Unpickler(io.BytesIO(raw), path)
    tensors = _extract_tensors(unpickler.load(), path)
    starts = {}
    for key, storage in unpickler.storages.items():
        record = records.find_stored_record(f"{top}/data/{key}")
        if record.size != storage.nbytes:
            problem = f"record '{record.name}' has the wrong size"
            raise make_damaged_file_error(problem, path, f"{record.size} bytes", storage.nbytes)
        starts[key] = record.start
    views = _make_views(tensors, starts)
    if records.checksums is None:
        unchecked = (
            f"{path}: was written without checksums, so damage to its weights cannot be detected"
        )
        return TensorFile(source, views, (unchecked,))
    source.checksums = records.checksums
    return TensorFile(source, views)


def _check_small_records(records: ZipRecords, top: str, path: Path) -> None:
    """Check the small records besides the pickle and the storages, some of which say how the
    file was written.
    """
    notes: dict[str, bytes] = {}
    for record_name in records.records:
        folder, _, name = record_name.partition("/")
        if folder != top or not name:
            raise make_damaged_file_error(
                f"record '{record_name}' is not in the folder '{top}'", path
            )
        if name != "data.pkl" and not name.startswith("data/"):
            notes[name] = records.read(record_name, _NOTE_BYTES)
    # Files of older versions of torch have no such record.
    _require_little_endian(notes.get("byteorder", b"little") == b"little", path)
    # torch writes one of the two after all tensors.
    if not {"version", ".data/version"} & set(notes):
        raise make_damaged_file_error(f"record '{top}/version' is missing", path)
    for name in {".storage_alignment", ".format_version", "version"} & set(notes):
        if not notes[name].strip().isdigit():
            raise CheckpointError(
                f"record '{top}/{name}' is damaged", path=path, found=repr(notes[name][:40])
            )


def _open_legacy(source: SourceFile) -> TensorFile:
    path = source.path
    head = io.BytesIO(source.read(0, min(source.size, MAX_BYTES)))
    unpickler = Unpickler(head, path)
    magic = unpickler.load()
    if magic != _MAGIC or unpickler.load() != _VERSION:
        raise make_unreadable_error(path, ValueError("torch.save did not write it"))
    system = unpickler.load()
    _require_little_endian(isinstance(system, dict) and system.get("little_endian") is True, path)
    tensors = _extract_tensors(unpickler.load(), path)
    keys = unpickler.load()
    if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
        raise make_unreadable_error(path, ValueError("it does not list its storages"))
    if sorted(map(str, keys)) != sorted(unpickler.storages):
        raise make_unreadable_error(
            path, ValueError("its storages are not those that its tensors refer to")
        )
    starts = {}
    position = head.tell()
    for key in map(str, keys):
        storage = unpickler.storages[key]
        end = position + 8 + storage.nbytes
        if end > source.size:
            raise make_damaged_file_error(
                "cannot be read: it is truncated", path, f"{source.size} bytes", f"at least {end}"
            )
        (count,) = struct.unpack("<q", source.read(position, 8))
        if count != storage.count:
            raise make_damaged_file_error(
                f"storage '{key}' has the wrong size", path, f"{count} elements", storage.count
            )
        starts[key] = position + 8
        position = end
    return TensorFile(source, _make_views(tensors, starts))


def _require_little_endian(holds: bool, path: Path) -> None:
    if not holds:
        raise _make_unsupported_error("was not written on a little-endian machine", path)


def _make_unsupported_error(
    problem: str, path: Path, expected: str | None = None
) -> UnsupportedError:
    return UnsupportedError(
        problem, path=path, expected=expected, hint="load it with torch and save it again"
    )


def _extract_tensors(value: Any, path: Path) -> dict[str, Reference]:
    """Extract the dictionary of tensors from the value of a pickle."""
    # Some training scripts save a model's tensors under this key.
    if isinstance(value, dict) and set(value) == {"model"} and isinstance(value["model"], dict):
        value = value["model"]
    if not isinstance(value, dict) or not value:
        raise CheckpointError(
            "does not contain a dictionary of tensors", path=path, found=type(value).__name__
        )
    for name, tensor in value.items():
        if isinstance(name, str) and isinstance(tensor, Other):
            raise UnsupportedError(
                f"entry {name!r:.80} is not a plain tensor", path=path, found=tensor.name
            )
        if not isinstance(name, str) or not isinstance(tensor, Reference):
            raise CheckpointError(
                f"entry {name!r:.80} is not a tensor", path=path, found=type(tensor).__name__
            )
    return value


def _make_views(tensors: Mapping[str, Reference], starts: Mapping[str, int]) -> dict[str, View]:
    views: dict[str, View] = {}
    for name, tensor in tensors.items():
        start = starts[tensor.storage.key] + tensor.offset * tensor.dtype.itemsize
        views[name] = View(tensor.dtype, start, tensor.shape, tensor.stride)
    return views


def _estimate_full_size(source: SourceFile) -> int:
    """Estimate the minimum size of a zip before it was truncated, from the pickle and the remaining
    records.

    torch.save writes a record's size after its data, so only the pickle, which comes first, has the
    storages' sizes.
    """
    size = source.size
    position = 0
    while position + LOCAL.size <= source.size:
        signature, *_, length, name_length, extra_length = LOCAL.unpack(
            source.read(position, LOCAL.size)
        )
        start = position + LOCAL.size + name_length + extra_length
        if signature != LOCAL_SIGNATURE or start > source.size:
            break
        if position == 0:
            pickled = io.BytesIO(source.read(start, min(source.size - start, MAX_BYTES)))
            unpickler = Unpickler(pickled, source.path)
            # The pickle may be cut off too; the storages before that point count.
            with contextlib.suppress(CheckpointError):
                unpickler.load()
            size = max(size, sum(storage.nbytes for storage in unpickler.storages.values()))
        length, _ = _read_wide_sizes(
            length, length, source.read(start - extra_length, extra_length)
        )
        position = start + length
    return max(position + TAIL.size, size + 1)


@dataclass(frozen=True)
class Record:
    """The place of a record's bytes, which are stored as they are or compressed."""

    name: str
    start: int
    size: int
    crc: int
    stored: bool


class ZipRecords:
    """All records of a zip file, by name.

    Raises:
        CheckpointError: if the directory cannot be read, contradicts the records, or names one
            twice.
        UnsupportedError: if a record is encrypted or a patch.

    Attributes:
        records: in the order of the file.
        checksums: of all records that are stored as they are; None if torch wrote the file without
            checksums.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        try:
            with zipfile.ZipFile(file.stream()) as archive:
                entries = archive.infolist()
                directory = archive.start_dir
        except _DAMAGE as error:
            raise make_unreadable_error(file.path, error) from error
        self._require_plain(entries, directory)
        self.records: dict[str, Record] = {}
        position = 0
        # In the order of their data, so that each begins at the end of the one before, or later.
        for info in sorted(entries, key=lambda info: info.header_offset):
            record = self._locate_record(info, position, directory)
            if record.name in self.records:
                raise self._contradiction(record.name, "occurs twice")
            self.records[record.name] = record
            position = record.start + info.compress_size
        self.checksums: list[Checksum] | None = None
        # torch writes zeros as checksums if it is told not to compute them.
        if any(record.crc for record in self.records.values()):
            self.checksums = []
            for record in self.records.values():
                # The checksum of a compressed record is that of its decompressed bytes.
                if record.stored:
                    end = record.start + record.size
                    self.checksums.append(Checksum(record.name, record.start, end, record.crc))

    def _require_plain(self, listed: list[zipfile.ZipInfo], directory: int) -> None:
        """Refuse a directory with comments, of several disks, or not at the end of the file: torch
        writes no such directory, and readers interpret it differently.
        """
        if not self._ends_file(listed, directory):
            raise make_damaged_file_error(
                "has a zip directory that torch does not write", self._file.path
            )
        position = directory
        for info in listed:
            fields = _CENTRAL.unpack(self._file.read(position, _CENTRAL.size))
            signature, name_length, extra_length, comment_length, disk = fields
            is_plain = signature == _CENTRAL_SIGNATURE and comment_length == 0 and disk == 0
            if not is_plain or info.external_attr & _IS_FOLDER:
                raise self._contradiction(
                    info.filename, "has an entry in the directory that torch does not write"
                )
            position += _CENTRAL.size + name_length + extra_length

    def _ends_file(self, listed: list[zipfile.ZipInfo], directory: int) -> bool:
        """Check that only a correct end record, for one disk, follows the directory."""
        end = self._file.size - TAIL.size
        fields = TAIL.unpack(self._file.read(end, TAIL.size))
        signature, *disks, disk_count, total_count, length, start, comment_length = fields
        if signature != TAIL_SIGNATURE or comment_length != 0 or any(disks):
            return False
        # A zip64 file has a second end record before the first, and a locator of it between them.
        locator = end - _LOCATOR.size
        if locator >= 0:
            locator_bytes = self._file.read(locator, _LOCATOR.size)
        else:
            locator_bytes = b""
        if locator_bytes[:4] == _LOCATOR_SIGNATURE:
            disk, end, disks_in_all = _LOCATOR.unpack(locator_bytes)
            if disk or disks_in_all != 1 or not 0 <= end <= locator - _WIDE_TAIL.size:
                return False
            fields = _WIDE_TAIL.unpack(self._file.read(end, _WIDE_TAIL.size))
            *disks, disk_count, total_count, length, start = fields
            if any(disks):
                return False
        if disk_count != len(listed) or total_count != len(listed):
            return False
        return bool(start == directory and start + length == end)

    def find_stored_record(self, name: str) -> Record:
        """Look up a record; a `CheckpointError` if it is missing, an `UnsupportedError` if it is
        compressed.
        """
        record = self.records.get(name)
        if record is None:
            raise make_damaged_file_error(f"record '{name}' is missing", self._file.path)
        if not record.stored:
            raise _make_unsupported_error(
                f"record '{name}' is compressed", self._file.path, "uncompressed records"
            )
        return record

    def read(self, name: str, limit: int) -> bytes:
        """Read a record's bytes, and compare them with its checksum; also a `CheckpointError` if it
        is longer than the limit.
        """
        record = self.find_stored_record(name)
        if record.size > limit:
            raise CheckpointError(
                f"record '{name}' is too long",
                path=self._file.path,
                found=f"{record.size} bytes",
                expected=f"at most {limit}",
            )
        raw = self._file.read(record.start, record.size)
        if self.checksums is not None and zlib.crc32(raw) != record.crc:
            raise make_damaged_file_error(f"record '{name}' is damaged", self._file.path)
        return raw

    def _locate_record(self, info: zipfile.ZipInfo, first: int, directory: int) -> Record:
        """Find the data of a record, and compare its local header with the directory.

        Args:
            first: where the record may begin: at the end of the one before.
            directory: where the directory begins, and records must have ended.
        """
        name = info.filename
        start = info.header_offset
        if not first <= start <= directory - LOCAL.size:
            raise self._contradiction(name, "overlaps another record or is outside the file")
        fields = LOCAL.unpack(self._file.read(start, LOCAL.size))
        signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = fields
        data = start + LOCAL.size + name_length + extra_length
        if signature != LOCAL_SIGNATURE or data > directory:
            raise self._contradiction(name, "is not where the directory says")
        head = self._file.read(start + LOCAL.size, name_length + extra_length)
        # `zipfile` decodes names by this rule of the format.
        if info.flag_bits & _UTF8:
            encoding = "utf-8"
        else:
            encoding = "cp437"
        if head[:name_length] != info.orig_filename.encode(encoding):
            raise self._contradiction(name, "has a different name than in the directory")
        if (flags | info.flag_bits) & _ALTERED:
            raise UnsupportedError(f"record '{name}' is encrypted or a patch", path=self._file.path)
        if data + info.compress_size > directory:
            raise self._contradiction(name, "reaches past the directory")
        size, packed = _read_wide_sizes(size, packed, head[name_length:])
        content = (crc, size, packed)
        listed_content = (info.CRC, info.file_size, info.compress_size)
        # torch writes a record's header before it knows these; then they follow the data.
        is_deferred = flags & _SIZES_FOLLOW and content == (0, 0, 0)
        if method != info.compress_type or (content != listed_content and not is_deferred):
            raise self._contradiction(name, "differs from its directory entry")
        is_stored = method == zipfile.ZIP_STORED
        if is_stored and info.file_size != info.compress_size:
            raise self._contradiction(name, "is stored in two sizes")
        return Record(
            name=name, start=data, size=info.compress_size, crc=info.CRC, stored=is_stored
        )

    def _contradiction(self, name: str, problem: str) -> CheckpointError:
        return make_damaged_file_error(f"record '{name}' {problem}", self._file.path)


def _read_wide_sizes(size: int, packed: int, extra: bytes) -> tuple[int, int]:
    """Read the sizes of a local header; 64-bit sizes are in its extra fields."""
    if FULL not in (size, packed):
        return size, packed
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        # Field 1 of zip64. In a local header it always has both sizes.
        if kind == 1 and length >= 16 and position + 4 + length <= len(extra):
            wide: tuple[int, int] = struct.unpack_from("<QQ", extra, position + 4)
            return wide
        position += 4 + length
    return size, packed
