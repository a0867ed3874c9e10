"""llama.cpp's importance matrices, the mean squares of each linear's inputs on a text: GGUF and the
older ``.dat``.

``.dat``: an int32 count of entries; for each its name, an int32 number of chunks, and float32 mean
squares times that number; then an int32 number of chunks of all text, and the name of the text.
GGUF: for each entry ``NAME.in_sum2`` [E, I] float32 and ``NAME.counts`` [E, 1], sums over tokens
and their numbers, of each expert E. Names are those of tensors in GGUF. Source: llama.cpp's
tools/imatrix and tools/quantize.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.files.gguf_io import build_header, padding, read_header
from quantkit.files.gguf_types import GgmlType, GgufTensor, Typed, ValueType
from quantkit.tensors.late import torch

KIND = "imatrix"
_SUMS = ".in_sum2"
_COUNTS = ".counts"
_DATASETS = "imatrix.datasets"
_CHUNKS = "imatrix.chunk_count"
_CHUNK_SIZE = "imatrix.chunk_size"
_MAX_NAME = 1 << 12
_INT = struct.Struct("<i")
_AGAIN = "make it again"


@dataclass(frozen=True)
class Entry:
    """A linear's inputs: their mean squares [E, I] float32, of each expert E or of the linear, and
    how many tokens these are from, [E] float32; of ``.dat`` a number of chunks, and all experts in
    one row.
    """

    means: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class ImportanceMatrix:
    """An importance matrix: entries by the name of the tensor in GGUF, and on what text: its name,
    the number of chunks and the tokens of each.
    """

    entries: Mapping[str, Entry]
    text: str
    chunks: int
    chunk_size: int

    def to_gguf(self) -> bytes:
        """Return the bytes of a GGUF file."""
        tensors = []
        data = []
        for name, entry in sorted(self.entries.items()):
            sums = entry.means * entry.counts.unsqueeze(1)
            for suffix, value in ((_SUMS, sums), (_COUNTS, entry.counts.unsqueeze(1))):
                tensors.append(GgufTensor(name + suffix, GgmlType.F32, tuple(value.shape)))
                content = value.float().contiguous().numpy().tobytes()
                data.append(content + padding(len(content)))
        metadata = {
            "general.type": KIND,
            _DATASETS: Typed(ValueType.STRING, [self.text]),
            _CHUNKS: self.chunks,
            _CHUNK_SIZE: self.chunk_size,
        }
        return build_header(metadata, tensors) + b"".join(data)

    def to_dat(self) -> bytes:
        """Return the bytes of a ``.dat`` file."""
        found = [_INT.pack(len(self.entries))]
        for name, entry in sorted(self.entries.items()):
            values = (entry.means.float() * max(1, self.chunks)).contiguous().numpy()
            found += [
                _text(name),
                _INT.pack(max(1, self.chunks)),
                _INT.pack(values.size),
                values.tobytes(),
            ]
        return b"".join([*found, _INT.pack(self.chunks), _text(self.text)])


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Return an importance matrix in a file of either form.

    Raises:
        CheckpointError: if there is none, or it is damaged or holds NaN, Inf or negative numbers.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            result = _read_gguf(path)
        else:
            result = _read_dat(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from error
    for name, entry in result.entries.items():
        if not (entry.means.isfinite().all() and (entry.means >= 0).all()):
            raise CheckpointError(
                f"entry '{name}' holds NaN, Inf or a negative mean square", path=path, hint=_AGAIN
            )
    return result


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_header(path)
    kind = header.metadata.get("general.type")
    if kind != KIND:
        raise CheckpointError(
            "is no importance matrix", path=path, found=f"general.type {kind}", expected=KIND
        )
    entries = {}
    for name, tensor in header.tensors.items():
        if not name.endswith(_SUMS):
            continue
        own = name.removesuffix(_SUMS)
        counted = header.tensors.get(own + _COUNTS)
        if counted is None or tensor.type is not GgmlType.F32 or counted.type is not GgmlType.F32:
            raise CheckpointError(
                f"'{own}' has no counts, or not in float32", path=path, hint=_AGAIN
            )
        sums, counts = (
            _floats(header.source.read(one.offset, one.nbytes)) for one in (tensor, counted)
        )
        if not counts.numel() or sums.numel() % counts.numel():
            raise CheckpointError(
                f"the counts of '{own}' do not fit its sums", path=path, hint=_AGAIN
            )
        sums = sums.view(counts.numel(), -1)
        entries[own] = Entry(sums / counts.clamp(min=1).unsqueeze(1), counts)
    texts = header.metadata.get(_DATASETS)
    if isinstance(texts, list) and texts:
        text = str(texts[0])
    else:
        text = ""
    chunks, size = (header.metadata.get(key) for key in (_CHUNKS, _CHUNK_SIZE))
    return ImportanceMatrix(
        entries, text, *(one if isinstance(one, int) else 0 for one in (chunks, size))
    )


def _read_dat(path: Path, data: bytes) -> ImportanceMatrix:
    position = 0

    def take(count: int) -> bytes:
        nonlocal position
        if not 0 <= count <= len(data) - position:
            raise CheckpointError(
                "is no importance matrix, or is truncated", path=path, hint=_AGAIN
            )
        position += count
        return data[position - count : position]

    def integer() -> int:
        return int(_INT.unpack(take(_INT.size))[0])

    def name() -> str:
        size = integer()
        return take(size if size <= _MAX_NAME else -1).decode("utf-8", "replace")

    entries = {}
    for _ in range(integer()):
        own = name()
        chunks = integer()
        count = integer()
        values = _floats(take(4 * count)).view(1, -1)
        entries[own] = Entry(values / max(1, chunks), torch.tensor([float(chunks)]))
    ended = position == len(data)  # older files end here
    return ImportanceMatrix(
        entries, chunks=0 if ended else integer(), text="" if ended else name(), chunk_size=0
    )


def _floats(data: bytes) -> torch.Tensor:
    if data:
        return torch.frombuffer(bytearray(data), dtype=torch.float32)
    return torch.empty(0)


def _text(text: str) -> bytes:
    return _INT.pack(len(text.encode())) + text.encode()
