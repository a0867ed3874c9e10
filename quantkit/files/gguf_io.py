"""The GGUF file: a strictly validated header, and the header to write.

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
from quantkit.files.gguf_types import SPLIT_KEYS, GgmlType, GgufTensor, Split, Typed, ValueType
from quantkit.files.source import (
    SourceFile,
    make_damaged_file_error,
    open_weights,
    require_adjacent,
)

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
# of ggml, the name in bytes
MAX_DIMS = 4
MAX_NAME = 63
_VERSIONS = (2, 3)
# The largest published vocabularies take some 15 MB.
_MAX_HEADER = 100_000_000
_MAX_ITEMS = 1 << 23  # of all arrays together
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
    cursor.require(key_count, 13, f"{key_count} metadata keys")
    for _ in range(key_count):
        key = cursor.read_text("a metadata key")
        if not key.isprintable():
            cursor.fail(f"a metadata key is {key!r:.80}")
        if key in metadata:
            cursor.fail(f"the metadata key '{key:.80}' comes twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        problem = "general.alignment is not a power of two"
        found = format_value(alignment)
        raise CheckpointError(problem, path=path, found=found, expected=f"such as {ALIGNMENT}")
    cursor.require(tensor_count, 24, f"{tensor_count} tensors")
    listed = [_read_tensor_entry(cursor) for _ in range(tensor_count)]
    tensors = _resolve_offsets(listed, _align_up(cursor.position, alignment), alignment, cursor)
    return GgufHeader(source, alignment, metadata, tensors, _split(metadata, path))


def build_header(
    metadata: Mapping[str, Any], tensors: Sequence[GgufTensor], alignment: int = ALIGNMENT
) -> bytes:
    """Return the bytes before the data, padded so that it is aligned; each tensor's data must be
    `padded` in turn.

    Args:
        metadata: plain values: an int becomes a uint32 (an int32 in a list), a float a float32;
            `Typed` for all others.
        tensors: in the order of their data; their offsets are ignored.

    Raises:
        UnsupportedError: for a tensor whose name or shape the format cannot hold.
        ValueError: for a value that its type cannot hold.
    """
    metadata = dict(metadata)
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
                f"GGUF cannot hold tensor '{name}'", found=list(shape), expected=expected
            )
        if shape[-1] % kind.block:
            problem = f"{kind} cannot hold tensor '{name}'"
            found = f"rows of {shape[-1]}"
            raise UnsupportedError(problem, found=found, expected=f"a multiple of {kind.block}")
        header += _pack_text(name) + _WORD.pack(len(shape))
        header += b"".join(_LENGTH.pack(size) for size in reversed(shape))
        header += _WORD.pack(kind.code) + _LENGTH.pack(position)
        position += _align_up(tensor.nbytes, alignment)
    return bytes(header + padding(len(header), alignment))


def padding(count: int, alignment: int = ALIGNMENT) -> bytes:
    """Return the padding after `count` bytes, up to the next multiple of the alignment."""
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
        """Check that the rest of the header has room for `count` items of at least `each` bytes."""
        left = min(self.source.size, _MAX_HEADER) - self.position
        if count * item_bytes > left:
            found = f"{description} at byte {self.position} of {self.source.size}"
            problem = "has an invalid GGUF header, or is truncated"
            raise make_damaged_file_error(problem, self.source.path, found, f"at most {left} bytes")

    def take(self, count: int, description: str) -> int:
        """Advance by `count` bytes; the offset at which they begin in the current piece, which
        has them all.
        """
        if self.position + count > self._start + len(self._piece):
            self.require(count, 1, description)
            length = min(max(count, _CHUNK), self.source.size - self.position)
            self._start, self._piece = self.position, self.source.read(self.position, length)
        place = self.position - self._start
        self.position += count
        return place

    def read_number(self, kind: struct.Struct, description: str = "a number") -> int:
        place = self.take(kind.size, description)
        number: int = kind.unpack_from(self._piece, place)[0]
        return number

    def read_text(self, description: str) -> str:
        length = self.read_number(_LENGTH, description)
        place = self.take(length, f"{description} of {length} bytes")
        try:
            return self._piece[place : place + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{description} is not UTF-8: {error.reason}")

    def value(self, key: str) -> Any:
        what = f"the value of '{key:.80}'"
        kind = self._read_type(what)
        if kind is not ValueType.ARRAY:
            return self._read_values(kind, 1, what)[0]
        kind = self._read_type(what)
        count = self.read_number(_LENGTH, what)
        self._items += count
        if kind is ValueType.ARRAY:
            self.fail(f"{what} is an array of arrays")
        if self._items > _MAX_ITEMS:
            self.fail(
                f"{what} is an array of {count} items, and all arrays may have {_MAX_ITEMS}"
                " together"
            )
        return self._read_values(kind, count, what)

    def _read_type(self, description: str) -> ValueType:
        code = self.read_number(_WORD, description)
        try:
            return ValueType(code)
        except ValueError:
            self.fail(f"{description} is of the unknown type {code}")

    def _read_values(self, kind: ValueType, count: int, description: str) -> list[Any]:
        if kind is ValueType.STRING:
            self.require(count, _LENGTH.size, description)
            return [self.read_text(description) for _ in range(count)]
        letter = _NUMBERS[kind]
        size = count * struct.calcsize(f"<{letter}")
        place = self.take(size, description)
        values = list(struct.unpack_from(f"<{count}{letter}", self._piece, place))
        if kind is not ValueType.BOOL:
            return values
        if max(values, default=0) > 1:
            self.fail(f"{description} is neither true nor false")
        return list(map(bool, values))


def _require_known_version(cursor: _Cursor) -> None:
    version = cursor.read_number(_WORD, "the version")
    path = cursor.source.path
    if version & 0xFFFF == 0 and version:
        hint = "gguf-convert-endian converts it"
        raise UnsupportedError(
            "is a big-endian GGUF file", path=path, expected="little-endian", hint=hint
        )
    if version not in _VERSIONS:
        problem = "is of a version of GGUF that is not read"
        hint = "download a newer file of the model"
        raise UnsupportedError(
            problem, path=path, found=version, expected=" or ".join(map(str, _VERSIONS)), hint=hint
        )


def _read_tensor_entry(cursor: _Cursor) -> GgufTensor:
    """Return a row of the table of tensors; its offset is from the start of the data."""
    name = cursor.read_text("a tensor's name")
    if not name or len(name.encode()) > MAX_NAME or not name.isprintable():
        cursor.fail(f"a tensor is named {name!r:.80}")
    dims = cursor.read_number(_WORD)
    if not 1 <= dims <= MAX_DIMS:
        cursor.fail(f"tensor '{name}' has {dims} dimensions, not 1 to {MAX_DIMS}")
    shape = tuple(reversed([cursor.read_number(_LENGTH) for _ in range(dims)]))
    code = cursor.read_number(_WORD)
    offset = cursor.read_number(_LENGTH)
    if code not in _TYPES:
        problem = f"tensor '{name}' has an unknown type"
        found = f"ggml's type {code}"
        raise UnsupportedError(problem, path=cursor.source.path, found=found)
    kind = _TYPES[code]
    if 0 in shape or math.prod(shape) > _MAX_SIZE // 8 or shape[-1] % kind.block:
        cursor.fail(f"tensor '{name}' of type {kind} has the sizes {list(shape)}")
    return GgufTensor(name, kind, shape, offset)


def _resolve_offsets(
    listed: Iterable[GgufTensor], start: int, alignment: int, cursor: _Cursor
) -> dict[str, GgufTensor]:
    """Return the tensors with offsets in the file, checked against its size."""
    path = cursor.source.path
    size = cursor.source.size
    result: dict[str, GgufTensor] = {}
    position = start
    end = cursor.position
    for tensor in listed:
        if tensor.name in result:
            cursor.fail(f"tensor '{tensor.name}' comes twice")
        require_adjacent(tensor.name, tensor.offset, position - start, path)
        result[tensor.name] = replace(tensor, offset=position)
        end = position + tensor.nbytes
        position = _align_up(end, alignment)
    if size < end:
        raise make_damaged_file_error("is truncated", path, f"{size} bytes", end)
    if size > position:
        raise CheckpointError(
            "has bytes after its last tensor", path=path, found=f"{size} bytes", expected=position
        )
    return result


def _split(metadata: Mapping[str, Any], path: Path) -> Split | None:
    """Return which part of a model a file is, by its metadata; None if it says nothing."""
    values: list[Any] = [metadata.get(key) for key in SPLIT_KEYS]
    if all(value is None for value in values):
        return None
    index, count, tensors = values
    integers = type(index) is type(count) is type(tensors) is int
    if not (integers and 0 <= index < count <= _MAX_PARTS and 0 <= tensors <= _MAX_SIZE):
        problem = f"{', '.join(SPLIT_KEYS)} do not say which part of a model it is"
        raise CheckpointError(problem, path=path, found=", ".join(map(format_value, values)))
    return Split(index, count, tensors)


def _align_up(position: int, alignment: int) -> int:
    return position + -position % alignment


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


def _pack_typed_value(key: str, value: Any) -> bytes:
    """Return the type and the value, as a file has them."""
    kind, plain = (value.kind, value.value) if isinstance(value, Typed) else (None, value)
    if not isinstance(plain, (list, tuple)):
        if kind is not None:
            kind = kind
        else:
            kind = _kind_of(key, plain, ValueType.UINT32)
        return _WORD.pack(kind) + _pack_values(key, kind, [plain])
    if kind is None:
        kinds = {_kind_of(key, item, ValueType.INT32) for item in plain}
        if len(kinds) != 1:
            raise ValueError(f"{key}: an array that is empty or of several kinds needs `Typed`")
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
        raise ValueError(f"{key}: GGUF has no {type(value).__name__}")
    return kinds[type(value)]
