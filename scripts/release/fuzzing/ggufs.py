"""Mutations of GGUF files: of any number or text in the header, of its keys and tensors as a
whole, of data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random

from fuzzing.raw import edge_integer, mutate_bytes

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_TEXTS = (
    b"\xff\xfe",
    b"\x00",
    b"",
    b"llama",
    b"qwen2",
    b"gemma3",
    b"clip",
    b"gpt2",
    b"none",
    b"\n",
    b"\xed\xa0\x80",
    b"a" * 70,
    b"blk.0.attn_q.weight",
    b"token_embd.weight",
    b"general.alignment",
    b"output.weight",
)
_FLOATS = (0.0, -1.0, 1e-45, 3e38, float("inf"), float("nan"), 1.0, 10000.0)


@dataclass(frozen=True)
class _Field:
    """A part of the header.

    Attributes:
        form: of a number, as struct has it; empty for a string.
        at, size: its bytes.
    """

    what: str
    form: str
    at: int
    size: int


class _Header:
    """Where the fields of a sound file's header lie, and which bytes a key or a tensor takes in
    all.
    """

    def __init__(self, data: bytes) -> None:
        """
        Raises:
            Exception: of some kind, where the file is not sound.
        """
        self.data = data
        self.at = 4
        self.fields: list[_Field] = []
        self._number("version", "<I")
        tensors, keys = self._number("tensors", "<Q"), self._number("keys", "<Q")
        self.keys = [self._key() for _ in range(keys)]
        self.tensors = [self._tensor() for _ in range(tensors)]
        self.end = self.at

    def _number(self, what: str, form: str) -> int:
        size = struct.calcsize(form)
        self.fields.append(_Field(what, form, self.at, size))
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return int(value)

    def _text(self, what: str) -> None:
        length = self._number(f"length of {what}", "<Q")
        self.fields.append(_Field(what, "", self.at, length))
        self.at += length
        if self.at > len(self.data):
            raise ValueError("cut off")

    def _key(self) -> tuple[int, int]:
        start = self.at
        self._text("a key")
        kind = self._number("kind", "<I")
        count = 1
        if kind == _ARRAY:
            kind, count = self._number("kind of items", "<I"), self._number("items", "<Q")
        if kind == _STRING:
            for _ in range(count):
                self._text("a string")
        else:
            forms = {1: "<B", 2: "<H", 4: "<f" if kind == 6 else "<I", 8: "<Q"}
            self.fields.append(_Field("a value", forms[_SIZES[kind]], self.at, _SIZES[kind]))
            self.at += count * _SIZES[kind]
        return start, self.at

    def _tensor(self) -> tuple[int, int]:
        start = self.at
        self._text("a tensor's name")
        for _ in range(self._number("dimensions", "<I")):
            self._number("a size", "<Q")
        self._number("type", "<I")
        self._number("offset", "<Q")
        return start, self.at


def mutate_gguf(rng: Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """One mutation of a GGUF file, and what it was."""
    try:
        header = _Header(data)
    except Exception:
        return mutate_bytes(rng, data, others)
    kind = rng.choice(
        ("field", "field", "field", "field", "text", "whole", "bytes", "data", "file")
    )
    if kind == "field":
        field = rng.choice(
            [one for one in header.fields if one.form and one.what != "length of a string"]
        )
        return _changed(rng, data, field)
    if kind == "text":
        return _retold(rng, data, rng.choice([one for one in header.fields if not one.form]))
    if kind == "whole":
        return _rearranged(rng, header)
    if kind == "bytes":
        return mutate_bytes(rng, data, others, (0, header.end))
    if kind == "data":
        return mutate_bytes(rng, data, others, (header.end, len(data)))
    return mutate_bytes(rng, data, others)


def _changed(rng: Random, data: bytes, field: _Field) -> tuple[bytes, str]:
    """Another number."""
    if field.form == "<f":
        value = rng.choice(_FLOATS)
        return data[: field.at] + struct.pack("<f", value) + data[
            field.at + 4 :
        ], f"{field.what} is {value}"
    if (
        field.what in ("kind", "kind of items", "type", "dimensions", "version")
        and rng.random() < 0.7
    ):
        number = rng.randrange(45)
        return data[: field.at] + struct.pack("<I", number) + data[
            field.at + 4 :
        ], f"{field.what} is {number}"
    if field.form == "<B":
        at = field.at
        return data[:at] + rng.randbytes(1) + data[
            at + 1 :
        ], f"{field.what} at {at} is another byte"
    changed, what = edge_integer(rng, data, field.at, field.form)
    return changed, f"{field.what}: {what}"


def _retold(rng: Random, data: bytes, field: _Field) -> tuple[bytes, str]:
    """Another string, with its length."""
    text = rng.choice(_TEXTS)
    start, stop = field.at - 8, field.at + field.size
    return data[:start] + struct.pack("<Q", len(text)) + text + data[
        stop:
    ], f"{field.what} at {start} is {text[:20]!r}"


def _rearranged(rng: Random, header: _Header) -> tuple[bytes, str]:
    """A key or a tensor dropped, doubled or moved, the counts adjusted more often than not."""
    data, of_keys = header.data, rng.random() < 0.5
    spans = header.keys if of_keys else header.tensors
    if not spans:
        return data[:-1], "last byte cut"
    first, end = spans[0][0], spans[-1][1]
    pieces = [data[low:high] for low, high in spans]
    at, to = rng.randrange(len(pieces)), rng.randrange(len(pieces))
    what = rng.choice(("dropped", "doubled", "moved"))
    piece = pieces.pop(at)
    if what == "doubled":
        pieces.insert(at, piece)
    if what != "dropped":
        pieces.insert(to, piece)
    counts = [len(header.tensors), len(header.keys)]
    if rng.random() < 0.8:
        counts[of_keys] = len(pieces)
    found = data[:8] + struct.pack("<QQ", *counts) + data[24:first] + b"".join(pieces) + data[end:]
    return found, f"{'key' if of_keys else 'tensor'} {at} {what}"
