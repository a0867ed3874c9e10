"""GGUF headers: what is written is read, and what is not as it should be is refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_names import case
from error_parts import raises

from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.files.gguf_io import GgufHeader, build_header, padding, read_header
from quantkit.files.gguf_types import (
    GgmlType,
    GgufTensor,
    Split,
    Typed,
    ValueType,
    name_part,
    parse_part_stem,
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
    header = _read(_content(alignment=alignment), tmp_path)
    expected = {
        key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()
    }
    assert {key: header.metadata[key] for key in expected} == expected
    assert header.alignment == alignment
    assert [(t.name, t.type, t.shape) for t in header.tensors.values()] == [
        (t.name, t.type, t.shape) for t in TENSORS
    ]
    assert all(tensor.offset % alignment == 0 for tensor in header.tensors.values())
    assert header.split is None


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
    metadata = _read(_content({"tokens": tokens, "scores": [0.5] * 400_000}), tmp_path).metadata
    assert metadata["tokens"] == tokens
    assert len(metadata["scores"]) == 400_000


def test_the_last_tensor_needs_no_padding_after_it(tmp_path: Path) -> None:
    content = _content(tensors=TENSORS[:2])
    assert _read(content[:-12], tmp_path).tensors["b"].nbytes == 20
    with raises(CheckpointError, path=tmp_path / "a.gguf"):
        _read(content[:-13], tmp_path)
    with raises(CheckpointError, path=tmp_path / "a.gguf", found=f"{len(content) + 1} bytes"):
        _read(content + b"\0", tmp_path)


def test_a_part_says_which_it_is(tmp_path: Path) -> None:
    split = Split(1, 3, 20)
    assert _read(_content(split.metadata(), []), tmp_path).split == split
    assert name_part("model", 1, 3) == "model-00002-of-00003.gguf"
    assert parse_part_stem("my-model-00002-of-00003.gguf") == "my-model"
    assert parse_part_stem("model.gguf") is None
    for wrong in (Split(3, 3, 20), Split(0, 0, 20), Split(0, 2, -1)):
        with raises(CheckpointError, path=tmp_path / "a.gguf"):
            _read(_content(wrong.metadata(), []), tmp_path)


def _patched(at: int, raw: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + raw + content[at + len(raw) :]


def _after(text: bytes, raw: bytes, skip: int = 0) -> Callable[[bytes], bytes]:
    """Bytes at an offset after the first occurrence of others, replaced."""
    return lambda content: _patched(content.index(text) + len(text) + skip, raw)(content)


def _named(name: bytes) -> bytes:
    """A name as the table of tensors has it, and the first byte of what follows."""
    return struct.pack("<Q", len(name)) + name


# What is changed in a sound file, the type of the error, and what it names.
DAMAGES: list[tuple[Callable[[bytes], bytes], type[QuantkitError], str]] = [
    (_patched(0, b"GGML"), CheckpointError, "GGUF"),
    (_patched(4, struct.pack(">I", 3)), UnsupportedError, "little-endian"),
    (_patched(4, struct.pack("<I", 1)), UnsupportedError, "found 1"),
    (_patched(8, struct.pack("<Q", 2**64 - 1)), CheckpointError, "18446744073709551615"),
    (_patched(8, struct.pack("<Q", 4)), CheckpointError, "''"),
    (_patched(16, struct.pack("<Q", 2**60)), CheckpointError, "1152921504606846976"),
    (_patched(24, struct.pack("<Q", 2**63)), CheckpointError, "9223372036854775808"),
    (_patched(32, b"\xff"), CheckpointError, "UTF-8"),
    (_patched(32, b"\n"), CheckpointError, "key"),
    (_after(b"general.architecture", b"\x0d"), CheckpointError, "13"),
    (_after(b"tokens", b"\x09", 4), CheckpointError, "'tokens'"),
    (_after(b"tokens", struct.pack("<Q", 2**40), 8), CheckpointError, "'tokens'"),
    (_after(b"tokens", struct.pack("<Q", 1_000_000), 8), CheckpointError, "'tokens'"),
    (_after(b"flag", b"\x02", 4), CheckpointError, "'flag'"),
    (_after(b"a.weight", struct.pack("<I", 5)), CheckpointError, "5"),
    (_after(b"a.weight", struct.pack("<I", 0)), CheckpointError, "0"),
    (_after(b"a.weight", struct.pack("<Q", 63), 4), CheckpointError, "'a.weight'"),
    (_after(b"a.weight", struct.pack("<Q", 2**62), 12), CheckpointError, "'a.weight'"),
    (_after(b"a.weight", struct.pack("<Q", 4), 12), CheckpointError, "'b'"),
    (_after(b"a.weight", struct.pack("<Q", 1 << 50), 12), CheckpointError, "'b'"),
    (_after(b"a.weight", struct.pack("<I", 4), 20), UnsupportedError, "ggml's type 4"),
    (_after(b"a.weight", struct.pack("<Q", 32), 24), CheckpointError, "'a.weight'"),
    (_after(b"a.weight", struct.pack("<Q", 2**64 - 32), 24), CheckpointError, "'a.weight'"),
    (lambda content: content[:200], CheckpointError, "200"),
    (lambda content: content[:-300], CheckpointError, "bytes"),
    (lambda content: content.replace(b"count", b"flags", 1), CheckpointError, "'flags'"),
    (lambda content: content.replace(_named(b"c"), _named(b"b")), CheckpointError, "'b'"),
]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for index, (change, error, name) in enumerate(DAMAGES):
        with case(index, name), raises(error, name, path=tmp_path / "a.gguf"):
            _read(change(_content()), tmp_path)


@pytest.mark.parametrize("alignment", [0, 3, -32, 1 << 40, "32", 32.0])
def test_an_alignment_is_a_power_of_two(alignment: Any, tmp_path: Path) -> None:
    value = Typed(ValueType.INT64, alignment) if isinstance(alignment, int) else alignment
    with raises(CheckpointError, "general.alignment", path=tmp_path / "a.gguf"):
        _read(build_header({"general.alignment": value}, []), tmp_path)


def test_what_the_format_cannot_hold_is_not_written() -> None:
    for tensor in (
        GgufTensor("a" * 64, GgmlType.F32, (1,)),
        GgufTensor("a", GgmlType.F32, (1, 1, 1, 1, 1)),
        GgufTensor("a", GgmlType.Q8_0, (2, 33)),
    ):
        with raises(UnsupportedError, f"'{tensor.name}'"):
            build_header({}, [tensor])
    for value in ([], [1, "a"], None, 2**32, -1):
        with pytest.raises(ValueError, match="key"):
            build_header({"key": value}, [])
