"""Read and write llama.cpp's importance matrices, the mean squares of each linear's inputs on a
text: GGUF and the older ``.dat``.

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
# In bytes. A longer name means that the file is something else.
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
        """Encode the matrix as a GGUF file."""
        tensors: list[GgufTensor] = []
        data: list[bytes] = []
        for name, entry in sorted(self.entries.items()):
            # GGUF stores sums and numbers, so that llama.cpp can add matrices of several texts.
            counts = entry.counts.unsqueeze(1)
            sums = entry.means * counts
            for suffix, value in ((_SUMS, sums), (_COUNTS, counts)):
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
        """Encode the matrix as a ``.dat`` file."""
        parts = [_INT.pack(len(self.entries))]
        # A GGUF file may lack the number of chunks, and with 0 all sums would become 0.
        chunks = max(1, self.chunks)
        for name, entry in sorted(self.entries.items()):
            values = (entry.means.float() * chunks).contiguous().numpy()
            parts.append(_text(name))
            parts.append(_INT.pack(chunks))
            parts.append(_INT.pack(values.size))
            parts.append(values.tobytes())
        parts.append(_INT.pack(self.chunks))
        parts.append(_text(self.text))
        return b"".join(parts)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read an importance matrix from a file of either form.

    Raises:
        CheckpointError: if there is none, or it is damaged or holds NaN, Inf or negative numbers.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            matrix = _read_gguf(path)
        else:
            matrix = _read_dat(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from error
    for name, entry in matrix.entries.items():
        if not (entry.means.isfinite().all() and (entry.means >= 0).all()):
            raise CheckpointError(
                f"entry '{name}' contains NaN, Inf or a negative mean square",
                path=path,
                hint=_AGAIN,
            )
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_header(path)
    kind = header.metadata.get("general.type")
    if kind != KIND:
        raise CheckpointError(
            "is not an importance matrix", path=path, found=f"general.type {kind}", expected=KIND
        )
    entries: dict[str, Entry] = {}
    for tensor_name, sums_tensor in header.tensors.items():
        if not tensor_name.endswith(_SUMS):
            continue
        name = tensor_name.removesuffix(_SUMS)
        counts_tensor = header.tensors.get(name + _COUNTS)
        if (
            counts_tensor is None
            or sums_tensor.type is not GgmlType.F32
            or counts_tensor.type is not GgmlType.F32
        ):
            raise CheckpointError(f"'{name}' has no counts in float32", path=path, hint=_AGAIN)
        sums = _floats(header.source.read(sums_tensor.offset, sums_tensor.nbytes))
        counts = _floats(header.source.read(counts_tensor.offset, counts_tensor.nbytes))
        if not counts.numel() or sums.numel() % counts.numel():
            raise CheckpointError(
                f"the counts of '{name}' do not match its sums", path=path, hint=_AGAIN
            )
        sums = sums.view(counts.numel(), -1)
        # An expert that the router never chose has a count of 0, and sums of 0.
        entries[name] = Entry(sums / counts.clamp(min=1).unsqueeze(1), counts)
    texts = header.metadata.get(_DATASETS)
    if isinstance(texts, list) and texts:
        text = str(texts[0])
    else:
        text = ""
    chunks = _integer_or_zero(header.metadata.get(_CHUNKS))
    chunk_size = _integer_or_zero(header.metadata.get(_CHUNK_SIZE))
    return ImportanceMatrix(entries, text, chunks, chunk_size)


def _integer_or_zero(value: object) -> int:
    if isinstance(value, int):
        return value
    return 0


def _read_dat(path: Path, data: bytes) -> ImportanceMatrix:
    position = 0

    def take(count: int) -> bytes:
        nonlocal position
        if not 0 <= count <= len(data) - position:
            raise CheckpointError(
                "is not an importance matrix, or is truncated", path=path, hint=_AGAIN
            )
        position += count
        return data[position - count : position]

    def read_integer() -> int:
        return int(_INT.unpack(take(_INT.size))[0])

    def read_name() -> str:
        size = read_integer()
        if size > _MAX_NAME:
            # `take` refuses a negative count.
            size = -1
        return take(size).decode("utf-8", "replace")

    entries: dict[str, Entry] = {}
    for _ in range(read_integer()):
        name = read_name()
        chunks = read_integer()
        count = read_integer()
        values = _floats(take(4 * count)).view(1, -1)
        # The file has the means times the number of chunks.
        entries[name] = Entry(values / max(1, chunks), torch.tensor([float(chunks)]))
    # Files of older versions of llama.cpp end after the entries.
    if position == len(data):
        return ImportanceMatrix(entries, text="", chunks=0, chunk_size=0)
    total_chunks = read_integer()
    return ImportanceMatrix(entries, text=read_name(), chunks=total_chunks, chunk_size=0)


def _floats(data: bytes) -> torch.Tensor:
    # `frombuffer` refuses an empty buffer, and warns about one that is read-only, as bytes are.
    if data:
        return torch.frombuffer(bytearray(data), dtype=torch.float32)
    return torch.empty(0)


def _text(text: str) -> bytes:
    return _INT.pack(len(text.encode())) + text.encode()
