"""GGUF headers: what is written is read, and what is not as it should be is refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.files.gguf_io import GgufHeader, build_header, padding, read_header
from quantkit.files.gguf_types import (
    GgmlType,
    GgufTensor,
    Split,
    Typed,
    ValueType,
    split_name,
    split_stem,
)

TENSORS = [
    GgufTensor("a.weight", GgmlType.Q4_0, (3, 64)),
    GgufTensor("b", GgmlType.F32, (5,)),
    GgufTensor("c", GgmlType.Q6_K, (2, 3, 256)),
]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "count": 7,
    "eps": 0.5,
    "flag": True,
    "tokens": ["a", "é", ""],
    "scores": [0.5, -1.0],
    "kinds": [1, -2],
    "flags": [True, False],
    "below": Typed(ValueType.INT32, -3),
    "far": Typed(ValueType.UINT64, 2**63),
    "none": Typed(ValueType.STRING, []),
    "exact": Typed(ValueType.FLOAT64, 0.1),
}


def _content(
    metadata: dict[str, Any] = METADATA, tensors: list[GgufTensor] = TENSORS, alignment: int = 32
) -> bytes:
    data = b"".join(bytes(tensor.nbytes) + padding(tensor.nbytes, alignment) for tensor in tensors)
    return build_header(metadata, tensors, alignment) + data


def _read(content: bytes, folder: Path) -> GgufHeader:
    path = folder / "a.gguf"
    path.write_bytes(content)
    return read_header(path)


@pytest.mark.parametrize("alignment", [32, 8, 64])
def test_what_is_written_is_read(alignment: int, tmp_path: Path) -> None:
    found = _read(_content(alignment=alignment), tmp_path)
    expected = {
        key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()
    }
    assert {key: found.metadata[key] for key in expected} == expected
    assert found.alignment == alignment
    assert [(t.name, t.type, t.shape) for t in found.tensors.values()] == [
        (t.name, t.type, t.shape) for t in TENSORS
    ]
    assert all(tensor.offset % alignment == 0 for tensor in found.tensors.values())
    assert found.split is None


def test_values_have_the_kinds_that_readers_look_for() -> None:
    header = build_header(METADATA, [])
    for key, kind in {
        "count": 4,
        "eps": 6,
        "flag": 7,
        "general.architecture": 8,
        "far": 10,
        "exact": 12,
    }.items():
        assert header[header.index(key.encode()) + len(key) :][:4] == struct.pack("<I", kind)
    for key, kind in {"tokens": 8, "scores": 6, "kinds": 5, "flags": 7, "none": 8}.items():
        assert header[header.index(key.encode()) + len(key) :][:8] == struct.pack("<II", 9, kind)


def test_a_header_longer_than_a_piece_is_read(tmp_path: Path) -> None:
    tokens = [f"token {index}" for index in range(90_000)]
    found = _read(_content({"tokens": tokens, "scores": [0.5] * 400_000}), tmp_path)
    assert found.metadata["tokens"] == tokens
    assert len(found.metadata["scores"]) == 400_000


def test_the_last_tensor_needs_no_padding_after_it(tmp_path: Path) -> None:
    content = _content(tensors=TENSORS[:2])
    assert _read(content[:-12], tmp_path).tensors["b"].nbytes == 20
    with pytest.raises(CheckpointError, match="is truncated"):
        _read(content[:-13], tmp_path)
    with pytest.raises(CheckpointError, match="has bytes after its last tensor"):
        _read(content + b"\0", tmp_path)


def test_a_part_says_which_it_is(tmp_path: Path) -> None:
    split = Split(1, 3, 20)
    assert _read(_content(split.metadata(), []), tmp_path).split == split
    assert split_name("model", 1, 3) == "model-00002-of-00003.gguf"
    assert split_stem("my-model-00002-of-00003.gguf") == "my-model"
    assert split_stem("model.gguf") is None
    for wrong in (Split(3, 3, 20), Split(0, 0, 20), Split(0, 2, -1)):
        with pytest.raises(CheckpointError, match="do not say which part"):
            _read(_content(wrong.metadata(), []), tmp_path)


def _patched(at: int, raw: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + raw + content[at + len(raw) :]


def _after(text: bytes, raw: bytes, skip: int = 0) -> Callable[[bytes], bytes]:
    """Bytes at an offset after the first occurrence of others, replaced."""
    return lambda content: _patched(content.index(text) + len(text) + skip, raw)(content)


def _named(name: bytes) -> bytes:
    """A name as the table of tensors has it, and the first byte of what follows."""
    return struct.pack("<Q", len(name)) + name


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (_patched(0, b"GGML"), CheckpointError, "is not a GGUF file"),
        (_patched(4, struct.pack(">I", 3)), UnsupportedError, "big-endian"),
        (_patched(4, struct.pack("<I", 1)), UnsupportedError, "GGUF version"),
        (
            _patched(8, struct.pack("<Q", 2**64 - 1)),
            CheckpointError,
            "18446744073709551615 tensors",
        ),
        (_patched(8, struct.pack("<Q", 4)), CheckpointError, "a tensor is named ''"),
        (
            _patched(16, struct.pack("<Q", 2**60)),
            CheckpointError,
            "1152921504606846976 metadata keys",
        ),
        (
            _patched(24, struct.pack("<Q", 2**63)),
            CheckpointError,
            "a metadata key of 9223372036854775808 bytes",
        ),
        (_patched(32, b"\xff"), CheckpointError, "not UTF-8"),
        (_patched(32, b"\n"), CheckpointError, "a metadata key is"),
        (_after(b"general.architecture", b"\x0d"), CheckpointError, "unknown type 13"),
        (_after(b"tokens", b"\x09", 4), CheckpointError, "array of arrays"),
        (
            _after(b"tokens", struct.pack("<Q", 2**40), 8),
            CheckpointError,
            "the limit for all arrays",
        ),
        (
            _after(b"tokens", struct.pack("<Q", 1_000_000), 8),
            CheckpointError,
            "the value of 'tokens'",
        ),
        (_after(b"flag", b"\x02", 4), CheckpointError, "neither true nor false"),
        (_after(b"a.weight", struct.pack("<I", 5)), CheckpointError, "5 dimensions"),
        (_after(b"a.weight", struct.pack("<I", 0)), CheckpointError, "0 dimensions"),
        (_after(b"a.weight", struct.pack("<Q", 63), 4), CheckpointError, "has the sizes"),
        (_after(b"a.weight", struct.pack("<Q", 2**62), 12), CheckpointError, "has the sizes"),
        (_after(b"a.weight", struct.pack("<Q", 4), 12), CheckpointError, "'b' overlaps another"),
        (
            _after(b"a.weight", struct.pack("<Q", 1 << 50), 12),
            CheckpointError,
            "'b' overlaps another",
        ),
        (_after(b"a.weight", struct.pack("<I", 4), 20), UnsupportedError, "ggml's type 4"),
        (
            _after(b"a.weight", struct.pack("<Q", 32), 24),
            CheckpointError,
            "is preceded by a gap",
        ),
        (
            _after(b"a.weight", struct.pack("<Q", 2**64 - 32), 24),
            CheckpointError,
            "is preceded by a gap",
        ),
        (lambda content: content[:200], CheckpointError, "truncated"),
        (lambda content: content[:-300], CheckpointError, "is truncated"),
        (
            lambda content: content.replace(b"count", b"flags", 1),
            CheckpointError,
            "'flags' occurs twice",
        ),
        (
            lambda content: content.replace(_named(b"c"), _named(b"b")),
            CheckpointError,
            "occurs twice",
        ),
    ],
)
def test_what_is_wrong_is_named(
    change: Callable[[bytes], bytes], error: type[QuantkitError], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        _read(change(_content()), tmp_path)


@pytest.mark.parametrize("alignment", [0, 3, -32, 1 << 40, "32", 32.0])
def test_an_alignment_is_a_power_of_two(alignment: Any, tmp_path: Path) -> None:
    value = Typed(ValueType.INT64, alignment) if isinstance(alignment, int) else alignment
    with pytest.raises(CheckpointError, match="power of two"):
        _read(build_header({"general.alignment": value}, []), tmp_path)


def test_what_the_format_cannot_hold_is_not_written() -> None:
    for tensor in (
        GgufTensor("a" * 64, GgmlType.F32, (1,)),
        GgufTensor("a", GgmlType.F32, (1, 1, 1, 1, 1)),
        GgufTensor("a", GgmlType.Q8_0, (2, 33)),
    ):
        with pytest.raises(UnsupportedError, match="cannot store tensor 'a"):
            build_header({}, [tensor])
    for value in ([], [1, "a"], None, 2**32, -1):
        with pytest.raises(ValueError, match="key"):
            build_header({"key": value}, [])
