"""Tensors read from their place in a file into new memory, as a whole or in part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from quantkit.errors import CheckpointError
from quantkit.files.source import SourceFile
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import torch
from quantkit.tensors.tensor_slice import TensorSlice

# Bytes per read if not all of them are needed.
BUFFER_BYTES = 1 << 23
_MAX_DIMS = 64  # of torch
_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header lists it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """The place of a tensor's elements in a file: the first at byte `start`, others by strides
    in elements.
    """

    dtype: DType
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def narrow(self, axis: int, start: int, length: int) -> View:
        """Part of an axis."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(
            self, start=self.start + start * self.stride[axis] * self.dtype.itemsize, shape=shape
        )

    def at(self, index: int) -> View:
        """Return one index of the first axis, which is removed."""
        return replace(self.narrow(0, index, 1), shape=self.shape[1:], stride=self.stride[1:])

    def every(self, first: int, step: int, count: int) -> View:
        """Evenly spaced indices of the first axis."""
        return replace(
            self.narrow(0, first, count), stride=(self.stride[0] * step, *self.stride[1:])
        )

    def transpose(self) -> View:
        """Return the axes in reverse."""
        return replace(self, shape=self.shape[::-1], stride=self.stride[::-1])

    def of(self, part: TensorSlice | None) -> list[View]:
        """Return a view for each range of a part."""
        if part is None:
            return [self]
        return [self.narrow(part.axis, start, stop - start) for start, stop in part.ranges]


class TensorFile:
    """The tensors of one open file.

    Every read raises a `CheckpointError` if the file was truncated since it was opened, or cannot
    be read.

    Attributes:
        tensors: by name, in the file's order.
        notes: for the user.
        metadata: further strings in its header.
    """

    def __init__(
        self,
        source: SourceFile,
        views: Mapping[str, View],
        notes: Sequence[str] = (),
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """The views are of all tensors, and within the file; a `CheckpointError` if a tensor, by
        repeating elements, is larger than the file.
        """
        self.source = source
        self.notes = notes
        self.metadata = metadata
        self.tensors = {
            name: StoredTensor(name, view.dtype, view.shape) for name, view in views.items()
        }
        self._views = views
        for name, tensor in self.tensors.items():
            if tensor.nbytes > source.size:
                problem = f"tensor '{name}' is larger than its file"
                found = f"{tensor.nbytes} bytes"
                raise CheckpointError(
                    problem, path=source.path, found=found, expected=f"at most {source.size}"
                )

    @property
    def path(self) -> Path:
        return self.source.path

    def add_name(self, name: str, other_name: str) -> StoredTensor:
        """Give the tensor `name` a second name, and return it with that."""
        self._views = {**self._views, other_name: self._views[name]}
        self.tensors[other_name] = replace(self.tensors[name], name=other_name)
        return self.tensors[other_name]

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it."""
        return self.read_view(self._views[name], part)

    def view(self, name: str) -> View:
        """Return the place of a tensor's elements."""
        return self._views[name]

    def read_view(self, view: View, part: TensorSlice | None = None) -> torch.Tensor:
        """Elements of the file, or a part of them."""
        shape = list(view.shape)
        if part is not None:
            shape[part.axis] = part.size
        target = view.dtype.empty(shape)
        self._read_into(target, view, part)
        return target

    def read_into(self, target: torch.Tensor, name: str, part: TensorSlice | None = None) -> None:
        """Fill a tensor of the right shape and dtype, contiguous or not."""
        self._read_into(target, self._views[name], part)

    def read_bytes(self, name: str, part: TensorSlice | None = None) -> bytes:
        """Return the elements of a tensor, or of a part of it, in order; without torch if they are
        contiguous in the file.
        """
        view, *others = self._views[name].of(part)
        if not others and view.stride == contiguous_strides(view.shape):
            return self.source.read(view.start, view.nbytes)
        return bytes(_bytes(self.read(name, part)))

    def row_parts(self, name: str) -> Iterator[TensorSlice]:
        """Yield a tensor's rows, a few megabytes at a time."""
        rows, *rest = self.tensors[name].shape
        step = max(1, BUFFER_BYTES // max(1, math.prod(rest) * self.tensors[name].dtype.itemsize))
        for start in range(0, rows, step):
            yield TensorSlice(0, ((start, min(start + step, rows)),))

    def _read_into(self, target: torch.Tensor, view: View, part: TensorSlice | None) -> None:
        start = 0
        for piece in view.of(part):
            if part is None:
                self._fill(target, piece)
            else:
                self._fill(target.narrow(part.axis, start, piece.shape[part.axis]), piece)
                start += piece.shape[part.axis]

    def _fill(self, target: torch.Tensor, view: View) -> None:
        if target.numel() == 0:
            return
        span = extent(view.shape, view.stride)
        if target.is_contiguous() and view.stride == target.stride():
            self.source.read_into(view.start, _bytes(target))
        elif span * view.dtype.itemsize <= BUFFER_BYTES:
            flat = target.new_empty(span)
            self.source.read_into(view.start, _bytes(flat))
            target.copy_(flat.as_strided(view.shape, view.stride))
        else:
            axis = max(range(len(view.shape)), key=lambda a: view.stride[a] * (view.shape[a] > 1))
            size = view.shape[axis]
            step = max(1, size * BUFFER_BYTES // (span * view.dtype.itemsize))
            for start in range(0, size, step):
                length = min(step, size - start)
                self._fill(target.narrow(axis, start, length), view.narrow(axis, start, length))


def same_tensor(file: TensorFile, name: str, other: TensorFile, other_name: str) -> bool:
    """Return whether two tensors are equal in shape, dtype and every bit; compared in pieces."""
    a = file.tensors[name]
    b = other.tensors[other_name]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    parts = file.row_parts(name) if a.shape else [None]
    return all(file.read_bytes(name, part) == other.read_bytes(other_name, part) for part in parts)


def sizes(value: object) -> tuple[int, ...]:
    """Return a shape or strides from a file; a `ValueError` if it is not a list of at most 64
    sizes.
    """
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMS:
        raise ValueError("a shape is not a short list")
    return tuple(size_number(size) for size in value)


def size_number(value: object) -> int:
    """Return a size or an offset from a file; a `ValueError` if it is of another type, negative, or
    past 63 bits.
    """
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise ValueError(f"a size or an offset is {value!r:.40}")
    return value


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements, as torch counts them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last in the file."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(DType.UINT8.torch).numpy().data
