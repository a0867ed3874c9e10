"""Read and strictly validate the header of a GGUF file, and build the header to write.

The `gguf` package maps files into memory, so a truncated file kills the process, and checks few
bounds. What ggml rejects is rejected here too: duplicate keys and tensors, arrays in arrays, data
with holes or overlaps. Source: the GGUF specification, versions 2 and 3 (docs/gguf.md of ggml):
magic, version, counts, metadata, a table of tensors, then their data in that order, each at a
multiple of the alignment.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.gguf_types import (
    MAGIC,
    SPLIT_KEYS,
    GgmlType,
    GgufTensor,
    Split,
    Typed,
    ValueType,
)
from quantkit.files.source import (
    SourceFile,
    make_damaged_file_error,
    open_weights,
    require_adjacent,
)

VERSION = 3
ALIGNMENT = 32
# Limits of ggml; the name's is in bytes.
MAX_DIMS = 4
MAX_NAME = 63
_VERSIONS = (2, 3)
# The largest published vocabularies take some 15 MB.
_MAX_HEADER = 100_000_000
# Of all arrays together: a few bytes in a file become a Python object each.
_MAX_ITEMS = 1 << 23
_MAX_ALIGNMENT = 1 << 20
_MAX_SIZE = (1 << 63) - 1
_MAX_PARTS = 1 << 16
_CHUNK = 1 << 20
_LENGTH = struct.Struct("<Q")
_WORD = struct.Struct("<I")
_TYPES = {kind.code: kind for kind in GgmlType}
_NUMBERS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        source: the open file.
        metadata: plain values by key; lists for arrays.
        tensors: by name, in the order of their data.
        split: which part of a model it is; None for a whole model.
    """

    source: SourceFile
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    split: Split | None

    @property
    def path(self) -> Path:
        return self.source.path


def read_header(path: Path) -> GgufHeader:
    """Open a file and validate its header; no data is read.

    Raises:
        CheckpointError: if it is a placeholder or malformed: counts and lengths beyond the file,
            unknown types of values, duplicate keys or tensors, offsets with holes or overlaps, too
            few or too many bytes.
        UnsupportedError: for another version or byte order, and unknown types of tensors.
    """
    source = open_weights(path)
    if source.read(0, min(source.size, 4)) != MAGIC:
        raise make_damaged_file_error("is not a GGUF file", path)
    cursor = _Cursor(source)
    _require_known_version(cursor)
    tensor_count = cursor.read_number(_LENGTH)
    key_count = cursor.read_number(_LENGTH)
    metadata: dict[str, Any] = {}
    # A key takes at least 13 bytes: the length of its name, its type, and a value of one byte.
    cursor.require(key_count, 13, f"{key_count} metadata keys")
    for _ in range(key_count):
        key = cursor.read_text("a metadata key")
        if not key.isprintable():
            cursor.fail(f"a metadata key is {key!r:.80}")
        if key in metadata:
            cursor.fail(f"the metadata key '{key:.80}' occurs twice")
        metadata[key] = cursor.read_value(key)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not _is_valid_alignment(alignment):
        raise CheckpointError(
            "general.alignment is not a power of two",
            path=path,
            found=format_value(alignment),
            expected=f"such as {ALIGNMENT}",
        )
    # A tensor takes at least 24 bytes: the length of its name, its number of dimensions, its type
    # and its offset.
    cursor.require(tensor_count, 24, f"{tensor_count} tensors")
    entries = [_read_tensor_entry(cursor) for _ in range(tensor_count)]
    data_start = _align_up(cursor.position, alignment)
    tensors = _resolve_offsets(entries, data_start, alignment, cursor)
    return GgufHeader(
        source=source,
        alignment=alignment,
        metadata=metadata,
        tensors=tensors,
        split=_read_split(metadata, path),
    )


def _is_valid_alignment(alignment: Any) -> bool:
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        return False
    # Only a power of two has a single bit.
    return alignment & (alignment - 1) == 0


def build_header(
    metadata: Mapping[str, Any], tensors: Sequence[GgufTensor], alignment: int = ALIGNMENT
) -> bytes:
    """Build the bytes before the data, padded so that it is aligned; the data of each tensor must
    be followed by its `padding`.

    Args:
        metadata: plain values: an int becomes a uint32 (an int32 in a list), a float a float32;
            `Typed` for all others.
        tensors: in the order of their data; their offsets are ignored.

    Raises:
        UnsupportedError: for a tensor whose name or shape the format cannot hold.
        ValueError: for a value that its type cannot hold.
    """
    metadata = dict(metadata)
    # Readers assume 32 without this key.
    if alignment != ALIGNMENT:
        metadata["general.alignment"] = alignment
    header = bytearray(
        MAGIC + _WORD.pack(VERSION) + _LENGTH.pack(len(tensors)) + _LENGTH.pack(len(metadata))
    )
    for key, value in metadata.items():
        header += _pack_text(key) + _pack_typed_value(key, value)
    position = 0
    for tensor in tensors:
        name = tensor.name
        shape = tensor.shape
        kind = tensor.type
        if len(name.encode()) > MAX_NAME or not 1 <= len(shape) <= MAX_DIMS:
            expected = f"1 to {MAX_DIMS} dimensions and a name of at most {MAX_NAME} bytes"
            raise UnsupportedError(
                f"GGUF cannot store tensor '{name}'", found=list(shape), expected=expected
            )
        if shape[-1] % kind.block:
            raise UnsupportedError(
                f"{kind} cannot store tensor '{name}'",
                found=f"rows of {shape[-1]}",
                expected=f"a multiple of {kind.block}",
            )
        header += _pack_text(name) + _WORD.pack(len(shape))
        # ggml lists the size along a row first, and numpy last.
        for size in reversed(shape):
            header += _LENGTH.pack(size)
        header += _WORD.pack(kind.code) + _LENGTH.pack(position)
        position += _align_up(tensor.nbytes, alignment)
    return bytes(header + padding(len(header), alignment))


def padding(count: int, alignment: int = ALIGNMENT) -> bytes:
    """Make the padding after `count` bytes, up to the next multiple of the alignment."""
    return bytes(-count % alignment)


class _Cursor:
    """A position in a file's header, which is read in pieces as needed."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.position = len(MAGIC)
        self._start = 0
        self._piece = b""
        self._items = 0

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"has an invalid GGUF header: {problem}", path=self.source.path)

    def require(self, count: int, item_bytes: int, description: str) -> None:
        """Check that the rest of the header has room for `count` items of at least `item_bytes`."""
        remaining = min(self.source.size, _MAX_HEADER) - self.position
        if count * item_bytes > remaining:
            raise make_damaged_file_error(
                "has an invalid GGUF header, or is truncated",
                self.source.path,
                f"{description} at byte {self.position} of {self.source.size}",
                f"at most {remaining} bytes",
            )

    def advance(self, count: int, description: str) -> int:
        """Advance by `count` bytes, and return the offset at which they begin in the current piece,
        which has them all.
        """
        if self.position + count > self._start + len(self._piece):
            self.require(count, 1, description)
            # More than requested, as most values take a few bytes.
            length = min(max(count, _CHUNK), self.source.size - self.position)
            self._piece = self.source.read(self.position, length)
            self._start = self.position
        offset = self.position - self._start
        self.position += count
        return offset

    def read_number(self, kind: struct.Struct, description: str = "a number") -> int:
        offset = self.advance(kind.size, description)
        number: int = kind.unpack_from(self._piece, offset)[0]
        return number

    def read_text(self, description: str) -> str:
        length = self.read_number(_LENGTH, description)
        offset = self.advance(length, f"{description} of {length} bytes")
        try:
            return self._piece[offset : offset + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{description} is not UTF-8: {error.reason}")

    def read_value(self, key: str) -> Any:
        """Read the value of a key: its type, then the value; for an array also type and number of
        its items.
        """
        description = f"the value of '{key:.80}'"
        kind = self._read_type(description)
        if kind is not ValueType.ARRAY:
            return self._read_values(kind, 1, description)[0]
        kind = self._read_type(description)
        count = self.read_number(_LENGTH, description)
        self._items += count
        if kind is ValueType.ARRAY:
            self.fail(f"{description} is an array of arrays")
        if self._items > _MAX_ITEMS:
            self.fail(
                f"{description} is an array of {count} items, and the limit for all arrays together"
                f" is {_MAX_ITEMS}"
            )
        return self._read_values(kind, count, description)

    def _read_type(self, description: str) -> ValueType:
        code = self.read_number(_WORD, description)
        try:
            return ValueType(code)
        except ValueError:
            self.fail(f"{description} is of the unknown type {code}")

    def _read_values(self, kind: ValueType, count: int, description: str) -> list[Any]:
        if kind is ValueType.STRING:
            # Before the loop, so that a wrong count fails at once.
            self.require(count, _LENGTH.size, description)
            return [self.read_text(description) for _ in range(count)]
        letter = _NUMBERS[kind]
        size = count * struct.calcsize(f"<{letter}")
        offset = self.advance(size, description)
        values = list(struct.unpack_from(f"<{count}{letter}", self._piece, offset))
        if kind is not ValueType.BOOL:
            return values
        if max(values, default=0) > 1:
            self.fail(f"{description} is neither true nor false")
        return list(map(bool, values))


def _require_known_version(cursor: _Cursor) -> None:
    version = cursor.read_number(_WORD, "the version")
    path = cursor.source.path
    # A small number whose bytes are in reverse order has no lower bits.
    if version & 0xFFFF == 0 and version:
        hint = "convert it with gguf-convert-endian"
        raise UnsupportedError(
            "is a big-endian GGUF file", path=path, expected="little-endian", hint=hint
        )
    if version not in _VERSIONS:
        problem = "has a GGUF version that is not supported"
        hint = "download a newer file of the model"
        raise UnsupportedError(
            problem, path=path, found=version, expected=" or ".join(map(str, _VERSIONS)), hint=hint
        )


def _read_tensor_entry(cursor: _Cursor) -> GgufTensor:
    """Read a row of the table of tensors; its offset is from the start of the data."""
    name = cursor.read_text("a tensor's name")
    if not name or len(name.encode()) > MAX_NAME or not name.isprintable():
        cursor.fail(f"a tensor is named {name!r:.80}")
    dims = cursor.read_number(_WORD)
    if not 1 <= dims <= MAX_DIMS:
        cursor.fail(f"tensor '{name}' has {dims} dimensions, not 1 to {MAX_DIMS}")
    reversed_shape = [cursor.read_number(_LENGTH) for _ in range(dims)]
    # ggml lists the size along a row first, and numpy last.
    shape = tuple(reversed(reversed_shape))
    code = cursor.read_number(_WORD)
    offset = cursor.read_number(_LENGTH)
    if code not in _TYPES:
        raise UnsupportedError(
            f"tensor '{name}' has an unknown type",
            path=cursor.source.path,
            found=f"ggml's type {code}",
        )
    kind = _TYPES[code]
    # No element takes more than 8 bytes, so the size in bytes fits 63 bits.
    if 0 in shape or math.prod(shape) > _MAX_SIZE // 8 or shape[-1] % kind.block:
        cursor.fail(f"tensor '{name}' of type {kind} has the sizes {list(shape)}")
    return GgufTensor(name, kind, shape, offset)


def _resolve_offsets(
    listed: Iterable[GgufTensor], start: int, alignment: int, cursor: _Cursor
) -> dict[str, GgufTensor]:
    """Convert offsets from the start of the data to offsets in the file, and check them against its
    size.
    """
    path = cursor.source.path
    size = cursor.source.size
    tensors: dict[str, GgufTensor] = {}
    position = start
    # A file without tensors may end right after its header.
    end = cursor.position
    for tensor in listed:
        if tensor.name in tensors:
            cursor.fail(f"tensor '{tensor.name}' occurs twice")
        require_adjacent(tensor.name, tensor.offset, position - start, path)
        tensors[tensor.name] = replace(tensor, offset=position)
        end = position + tensor.nbytes
        position = _align_up(end, alignment)
    # The padding after the last tensor may be missing.
    if size < end:
        raise make_damaged_file_error("is truncated", path, f"{size} bytes", end)
    if size > position:
        raise CheckpointError(
            "has bytes after its last tensor", path=path, found=f"{size} bytes", expected=position
        )
    return tensors


def _read_split(metadata: Mapping[str, Any], path: Path) -> Split | None:
    """Read from the metadata which part of a model a file is; None if the keys are absent."""
    values: list[Any] = [metadata.get(key) for key in SPLIT_KEYS]
    if all(value is None for value in values):
        return None
    index, count, tensors = values
    integers = type(index) is type(count) is type(tensors) is int
    if not (integers and 0 <= index < count <= _MAX_PARTS and 0 <= tensors <= _MAX_SIZE):
        # Some keys are absent, or their values contradict each other.
        problem = f"{', '.join(SPLIT_KEYS)} do not say which part of a model it is"
        raise CheckpointError(problem, path=path, found=", ".join(map(format_value, values)))
    return Split(index, count, tensors)


def _align_up(position: int, alignment: int) -> int:
    return position + -position % alignment


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


def _pack_typed_value(key: str, value: Any) -> bytes:
    """Encode the type and the value of a key."""
    kind: ValueType | None
    if isinstance(value, Typed):
        kind = value.kind
        plain = value.value
    else:
        kind = None
        plain = value
    if not isinstance(plain, (list, tuple)):
        if kind is None:
            kind = _kind_of(key, plain, ValueType.UINT32)
        return _WORD.pack(kind) + _pack_values(key, kind, [plain])
    if kind is None:
        kinds = {_kind_of(key, item, ValueType.INT32) for item in plain}
        if len(kinds) != 1:
            raise ValueError(f"{key}: an array that is empty or has mixed types needs `Typed`")
        (kind,) = kinds
    return (
        _WORD.pack(ValueType.ARRAY)
        + _WORD.pack(kind)
        + _LENGTH.pack(len(plain))
        + _pack_values(key, kind, plain)
    )


def _pack_values(key: str, kind: ValueType, values: Sequence[Any]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(map(_pack_text, values))
    try:
        return struct.pack(f"<{len(values)}{_NUMBERS[kind]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{key}: {error}") from error


def _kind_of(key: str, value: Any, integer: ValueType) -> ValueType:
    kinds = {str: ValueType.STRING, bool: ValueType.BOOL, float: ValueType.FLOAT32, int: integer}
    if type(value) not in kinds:
        raise ValueError(f"{key}: GGUF does not support {type(value).__name__} values")
    return kinds[type(value)]
