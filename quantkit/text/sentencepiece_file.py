"""Read and write sentencepiece's model file without its library, which does not report all settings
of a model and does not write models.

Source: ``sentencepiece_model.proto``, in Protocol Buffers' wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

from quantkit.errors import CheckpointError

# Wire types of Protocol Buffers.
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
# The code of the model type.
_BPE = 2
# 64 bits in groups of 7.
_LONGEST_VARINT = 10
# The trainer's default spellings, and the fields of its ids and spellings.
_SPELLED = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
_ID_FIELDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_PIECE_FIELDS = {"unk": 45, "bos": 46, "eos": 47, "pad": 48}


class PieceType(IntEnum):
    """The type of a piece, by its code in files; the same as in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceFile:
    """The content of a file, as far as it determines how text is tokenized.

    Attributes:
        pieces: spelling, score and type of each token.
        byte_pair: whether it merges pairs, best scores first; otherwise it is another type of
            model.
        space_prefix: whether a space is added before text.
        plain: whether text is not normalized, except for spaces, each of which becomes U+2581.
        ids: of the special tokens ``unk``, ``bos``, ``eos`` and ``pad``; negative for none.
        rules: a digest of the normalization; empty if there is none.
    """

    pieces: Sequence[tuple[str, float, PieceType]]
    byte_pair: bool
    space_prefix: bool
    plain: bool
    ids: dict[str, int]
    rules: str = ""


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a model file; raises `CheckpointError` if the file is damaged."""
    try:
        return _parse_model(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error, TypeError) as error:
        raise CheckpointError(f"is not a sentencepiece model: {error}", path=path) from error


def sentencepiece_bytes(model: SentencePieceFile) -> bytes:
    """Encode the file of a model that merges pairs, has tokens for bytes, and does not normalize
    text.
    """
    data = bytearray()
    for spelling, score, kind in model.pieces:
        piece = _field(1, spelling.encode()) + _tag(2, _FIXED32) + struct.pack("<f", score)
        # A field with its default value is left out, as sentencepiece writes it.
        if kind is not PieceType.NORMAL:
            piece += _number(3, kind)
        data += _field(1, piece)
    # Fields: the model type, the vocabulary's size, and whether there are tokens for bytes.
    trainer = _number(3, _BPE) + _number(4, len(model.pieces)) + _number(35, 1)
    for name, index in model.ids.items():
        trainer += _number(_ID_FIELDS[name], index)
        if index >= 0:
            trainer += _field(_PIECE_FIELDS[name], model.pieces[index][0].encode())
    # Fields: name, space prefix, removal of extra spaces, and U+2581 for a space.
    normalizer = (
        _field(1, b"identity") + _number(3, model.space_prefix) + _number(4, 0) + _number(5, 1)
    )
    return bytes(data + _field(2, trainer) + _field(3, normalizer))


def _parse_model(data: bytes) -> SentencePieceFile:
    pieces: list[tuple[str, float, PieceType]] = []
    trainer = b""
    normalizer = b""
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_bytes(value)))
        elif number == 2:
            trainer = _bytes(value)
        elif number == 3:
            normalizer = _bytes(value)
    training = dict(_fields(trainer))
    normal = dict(_fields(normalizer))
    special_ids: dict[str, int] = {}
    for index, (spelling, _, kind) in enumerate(pieces):
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
            special_ids[spelling] = index
    # The library finds special tokens by their spellings: ids in the file have no effect.
    ids: dict[str, int] = {}
    for name, default in _SPELLED.items():
        encoded = _bytes(training.get(_PIECE_FIELDS[name], default.encode()))
        ids[name] = special_ids.get(encoded.decode(), -1)
    # Fields: rules, removal of extra spaces, U+2581 for a space, and spaces at the ends of words.
    normalization = (normal.get(2, b""), normal.get(4, 1), normal.get(5, 1), training.get(24, 0))
    plain = normalization == (b"", 0, 1, 0)
    if plain:
        rules = ""
    else:
        rules = sha256(repr(normalization).encode()).hexdigest()
    return SentencePieceFile(
        pieces=pieces,
        byte_pair=training.get(3, 1) == _BPE,
        space_prefix=normal.get(3, 1) == 1,
        plain=plain,
        ids=ids,
        rules=rules,
    )


def _piece(data: bytes) -> tuple[str, float, PieceType]:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    spelling = _bytes(fields.get(1, b"")).decode()
    kind = fields.get(3, PieceType.NORMAL)
    if not isinstance(kind, int):
        # No type has this code, so that it is an error.
        kind = 0
    return spelling, score, PieceType(kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message by number: integers, and bytes for all other types."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        # The low three bits are the wire type, the others are the field's number.
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"byte {place} does not begin a field")
        if place + length > len(data):
            raise ValueError(f"it ends within the field at byte {place}")
        yield tag >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = data[place]
    # Most numbers have a single byte.
    if value < 0x80:
        return value, place + 1
    value = 0
    for index in range(_LONGEST_VARINT):
        byte = data[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    raise ValueError(f"byte {place} does not begin a number")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _tag(number: int, kind: int) -> bytes:
    return _encode_varint(number << 3 | kind)


def _field(number: int, value: bytes) -> bytes:
    return _tag(number, _BYTES) + _encode_varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    # Negative numbers are written in two's complement.
    return _tag(number, _VARINT) + _encode_varint(value % (1 << 64))


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    # Seven bits in each byte, the lowest first; the high bit says that another byte follows.
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
