"""The records of an uncompressed zip file: where each is, if its directory entry and its own header agree.

`zipfile` trusts the directory and other readers the headers, so one file could hold two models. Both are compared.
Source: PKWARE's APPNOTE.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.pickles import damaged
from quantkit.files.source import Checksum, SourceFile, damaged_file

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_SIGNATURE = 0x04034B50
_CENTRAL = struct.Struct("<I24xHHHH10x")  # a directory entry: its lengths, and its disk
_CENTRAL_SIGNATURE = 0x02014B50
_IS_FOLDER = 0x10  # some readers then read nothing
# After the directory: its disks, its entries (here, in all), its length and its offset.
_TAIL, _TAIL_SIGNATURE = struct.Struct("<IHHHHIIH"), 0x06054B50
_LOCATOR, _LOCATOR_SIGNATURE = struct.Struct("<4xIQI"), b"PK\x06\x07"
_WIDE_TAIL = struct.Struct("<16xIIQQQQ")
_FULL = 0xFFFFFFFF
_SIZES_FOLLOW, _UTF8 = 0x8, 0x800
_ALTERED = 0x2061  # encrypted in one of three ways, or a patch of another record
_DAMAGE = (
    zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, IndexError, KeyError, OverflowError, EOFError,
    MemoryError, OSError,
)  # fmt: skip


def has_directory(file: SourceFile) -> bool:
    """Whether a zip file ends with its directory.

    Raises:
        CheckpointError: if that is damaged.
    """
    try:
        return zipfile.is_zipfile(file.stream())
    except _DAMAGE as error:
        raise damaged(file.path, error) from error


@dataclass(frozen=True)
class Record:
    """The place of a record's bytes, which are stored as they are or compressed."""

    name: str
    start: int
    size: int
    crc: int
    stored: bool

    @property
    def stop(self) -> int:
        return self.start + self.size


class ZipRecords:
    """All records of a zip file, by name.

    Attributes:
        checksums: of all records that are stored as they are; None if torch wrote the file without checksums.
    """

    def __init__(self, file: SourceFile) -> None:
        """
        Raises:
            CheckpointError: if the directory cannot be read, contradicts the records, or names one twice.
            UnsupportedError: if a record is encrypted or a patch.
        """
        self._file = file
        try:
            with zipfile.ZipFile(file.stream()) as archive:
                listed, directory = archive.infolist(), archive.start_dir
        except _DAMAGE as error:
            raise damaged(file.path, error) from error
        self._require_plain(listed, directory)
        self._records: dict[str, Record] = {}
        position = 0
        for info in sorted(listed, key=lambda info: info.header_offset):
            record = self._located(info, position, directory)
            if record.name in self._records:
                raise self._contradiction(record.name, "is there twice")
            self._records[record.name] = record
            position = record.start + info.compress_size
        self.checksums: list[Checksum] | None = None
        if any(record.crc for record in self._records.values()):
            self.checksums = [Checksum(r.name, r.start, r.stop, r.crc) for r in self._records.values() if r.stored]

    def _require_plain(self, listed: list[zipfile.ZipInfo], directory: int) -> None:
        """Refuse a directory with comments, of several disks, or not at the end of the file: torch writes none, and
        readers interpret it differently."""
        if not self._ends_file(listed, directory):
            raise damaged_file("has a zip directory that torch does not write", self._file.path)
        position = directory
        for info in listed:
            fields = _CENTRAL.unpack(self._file.read(position, _CENTRAL.size))
            signature, name_length, extra_length, comment_length, disk = fields
            if (signature, comment_length, disk) != (_CENTRAL_SIGNATURE, 0, 0) or info.external_attr & _IS_FOLDER:
                raise self._contradiction(info.filename, "has an entry in the directory that torch does not write")
            position += _CENTRAL.size + name_length + extra_length

    def _ends_file(self, listed: list[zipfile.ZipInfo], directory: int) -> bool:
        """Whether only a correct end record, for one disk, follows the directory."""
        end = self._file.size - _TAIL.size
        signature, *disks, here, in_all, length, start, comment = _TAIL.unpack(self._file.read(end, _TAIL.size))
        if (signature, comment, *disks) != (_TAIL_SIGNATURE, 0, 0, 0):
            return False
        count, locator = len(listed), end - _LOCATOR.size
        wide = self._file.read(locator, _LOCATOR.size) if locator >= 0 else b""
        if wide[:4] == _LOCATOR_SIGNATURE:
            disk, end, disks_in_all = _LOCATOR.unpack(wide)
            if disk or disks_in_all != 1 or not 0 <= end <= locator - _WIDE_TAIL.size:
                return False
            *disks, here, in_all, length, start = _WIDE_TAIL.unpack(self._file.read(end, _WIDE_TAIL.size))
            if any(disks):
                return False
        return (here, in_all, start, start + length) == (count, count, directory, end)

    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self._records)

    def stored(self, name: str) -> Record:
        """A record that is stored as it is.

        Raises:
            CheckpointError: if it is missing.
            UnsupportedError: if it is compressed.
        """
        record = self._records.get(name)
        if record is None:
            raise damaged_file(f"record '{name}' is missing", self._file.path)
        if not record.stored:
            raise UnsupportedError(
                f"record '{name}' is compressed", path=self._file.path, expected="records stored as they are",
                hint="load it with torch and save it again",
            )  # fmt: skip
        return record

    def read(self, name: str, limit: int) -> bytes:
        """A record's bytes, compared with its checksum.

        Raises:
            CheckpointError: if it is missing, longer than the limit, or damaged.
            UnsupportedError: see `stored`.
        """
        record = self.stored(name)
        if record.size > limit:
            problem, found = f"record '{name}' is too long", f"{record.size} bytes"
            raise CheckpointError(problem, path=self._file.path, found=found, expected=f"at most {limit}")
        raw = self._file.read(record.start, record.size)
        if self.checksums is not None and zlib.crc32(raw) != record.crc:
            raise damaged_file(f"record '{name}' is damaged", self._file.path)
        return raw

    def _located(self, info: zipfile.ZipInfo, first: int, directory: int) -> Record:
        name, start = info.filename, info.header_offset
        if not first <= start <= directory - _LOCAL.size:
            raise self._contradiction(name, "overlaps another or lies outside the file")
        fields = _LOCAL.unpack(self._file.read(start, _LOCAL.size))
        signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = fields
        data = start + _LOCAL.size + name_length + extra_length
        if signature != _LOCAL_SIGNATURE or data > directory:
            raise self._contradiction(name, "is not where the directory says")
        head = self._file.read(start + _LOCAL.size, name_length + extra_length)
        if head[:name_length] != info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437"):
            raise self._contradiction(name, "has another name than in the directory")
        if (flags | info.flag_bits) & _ALTERED:
            raise UnsupportedError(f"record '{name}' is encrypted or a patch", path=self._file.path)
        if data + info.compress_size > directory:
            raise self._contradiction(name, "reaches past the directory")
        size, packed = _wide(size, packed, head[name_length:])
        stored = (method, crc, size, packed)
        listed = (info.compress_type, info.CRC, info.file_size, info.compress_size)
        follows = flags & _SIZES_FOLLOW and stored[1:] == (0, 0, 0)
        if stored != listed and not (follows and method == info.compress_type):
            raise self._contradiction(name, "differs from what the directory says of it")
        as_it_is = method == zipfile.ZIP_STORED
        if as_it_is and info.file_size != info.compress_size:
            raise self._contradiction(name, "is stored in two sizes")
        return Record(name, data, info.compress_size, info.CRC, as_it_is)

    def _contradiction(self, name: str, problem: str) -> CheckpointError:
        return damaged_file(f"record '{name}' {problem}", self._file.path)


def _wide(size: int, packed: int, extra: bytes) -> tuple[int, int]:
    """The sizes in a local header; 64-bit sizes are in its extra fields."""
    if _FULL not in (size, packed):
        return size, packed
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1 and length >= 16 and position + 4 + length <= len(extra):
            wide: tuple[int, int] = struct.unpack_from("<QQ", extra, position + 4)
            return wide
        position += 4 + length
    return size, packed
