"""Read tensors, or parts of them, from their place in a file into new memory."""

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
# The limit of torch.
_MAX_DIMS = 64
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
        """Select a part of an axis."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        first_byte = self.start + start * self.stride[axis] * self.dtype.itemsize
        return replace(self, start=first_byte, shape=shape)

    def at(self, index: int) -> View:
        """Select an index of the first axis, and remove the axis."""
        return replace(self.narrow(0, index, 1), shape=self.shape[1:], stride=self.stride[1:])

    def every(self, first: int, step: int, count: int) -> View:
        """Select evenly spaced indices of the first axis."""
        # `narrow` gives the first byte and the shape; a larger stride spaces the indices.
        return replace(
            self.narrow(0, first, count), stride=(self.stride[0] * step, *self.stride[1:])
        )

    def transpose(self) -> View:
        """Reverse the order of the axes."""
        return replace(self, shape=self.shape[::-1], stride=self.stride[::-1])

    def split_by_ranges(self, part: TensorSlice | None) -> list[View]:
        """Make a view for each range of a part."""
        if part is None:
            return [self]
        views: list[View] = []
        for start, stop in part.ranges:
            views.append(self.narrow(part.axis, start, stop - start))
        return views


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
        """Take the views of all tensors, which are within the file; a `CheckpointError` if a
        tensor, by repeating elements, is larger than the file.
        """
        self.source = source
        self.notes = notes
        self.metadata = metadata
        self.tensors: dict[str, StoredTensor] = {}
        self._views = views
        for name, view in views.items():
            # A stride of 0 in a small file could request any amount of memory.
            if view.nbytes > source.size:
                raise CheckpointError(
                    f"tensor '{name}' is larger than its file",
                    path=source.path,
                    found=f"{view.nbytes} bytes",
                    expected=f"at most {source.size}",
                )
            self.tensors[name] = StoredTensor(name, view.dtype, view.shape)

    @property
    def path(self) -> Path:
        return self.source.path

    def add_name(self, name: str, other_name: str) -> StoredTensor:
        """Give the tensor `name` a second name, and return it under that name."""
        # A copy, as the caller of the constructor may still use the mapping.
        self._views = {**self._views, other_name: self._views[name]}
        self.tensors[other_name] = replace(self.tensors[name], name=other_name)
        return self.tensors[other_name]

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Read a tensor, or a part of it."""
        return self.read_view(self._views[name], part)

    def view(self, name: str) -> View:
        """Look up the place of a tensor's elements."""
        return self._views[name]

    def read_view(self, view: View, part: TensorSlice | None = None) -> torch.Tensor:
        """Read elements of the file, or a part of them."""
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
        """Read the elements of a tensor, or of a part of it, in order; without torch if they are
        contiguous in the file.
        """
        view, *further_views = self._views[name].split_by_ranges(part)
        if not further_views and view.stride == contiguous_strides(view.shape):
            return self.source.read(view.start, view.nbytes)
        return bytes(_bytes(self.read(name, part)))

    def row_parts(self, name: str) -> Iterator[TensorSlice]:
        """Yield a tensor's rows, a few megabytes at a time."""
        tensor = self.tensors[name]
        rows, *row_shape = tensor.shape
        row_bytes = math.prod(row_shape) * tensor.dtype.itemsize
        # A row may have no bytes, or more than the buffer.
        step = max(1, BUFFER_BYTES // max(1, row_bytes))
        for start in range(0, rows, step):
            yield TensorSlice(0, ((start, min(start + step, rows)),))

    def _read_into(self, target: torch.Tensor, view: View, part: TensorSlice | None) -> None:
        start = 0
        for piece in view.split_by_ranges(part):
            if part is None:
                self._fill(target, piece)
            else:
                # The ranges of a part follow each other in the target.
                length = piece.shape[part.axis]
                self._fill(target.narrow(part.axis, start, length), piece)
                start += length

    def _fill(self, target: torch.Tensor, view: View) -> None:
        if target.numel() == 0:
            return
        span = compute_extent(view.shape, view.stride)
        # Equal layouts: read the bytes directly into the tensor.
        if target.is_contiguous() and view.stride == target.stride():
            self.source.read_into(view.start, _bytes(target))
        # One read of everything in between, rather than one per run of elements.
        elif span * view.dtype.itemsize <= BUFFER_BYTES:
            flat = target.new_empty(span)
            self.source.read_into(view.start, _bytes(flat))
            target.copy_(flat.as_strided(view.shape, view.stride))
        else:
            # Split the axis with the largest stride, so that each part covers a short range of the
            # file. An axis of one element cannot be split.
            splittable_strides: list[int] = []
            for axis_size, stride in zip(view.shape, view.stride, strict=True):
                splittable_strides.append(stride if axis_size > 1 else 0)
            axis = splittable_strides.index(max(splittable_strides))
            size = view.shape[axis]
            step = max(1, size * BUFFER_BYTES // (span * view.dtype.itemsize))
            for start in range(0, size, step):
                length = min(step, size - start)
                self._fill(target.narrow(axis, start, length), view.narrow(axis, start, length))


def same_tensor(file: TensorFile, name: str, other: TensorFile, other_name: str) -> bool:
    """Compare two tensors, in pieces; True if they are equal in shape, dtype and every bit."""
    tensor = file.tensors[name]
    other_tensor = other.tensors[other_name]
    if (tensor.shape, tensor.dtype) != (other_tensor.shape, other_tensor.dtype):
        return False
    # A tensor without dimensions has no rows.
    if not tensor.shape:
        return file.read_bytes(name) == other.read_bytes(other_name)
    for part in file.row_parts(name):
        if file.read_bytes(name, part) != other.read_bytes(other_name, part):
            return False
    return True


def check_sizes(value: object) -> tuple[int, ...]:
    """Check a shape or strides from a file; a `ValueError` unless it is a list of at most 64
    sizes.
    """
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMS:
        raise ValueError("a shape is not a short list")
    return tuple(check_size(size) for size in value)


def check_size(value: object) -> int:
    """Check a size or an offset from a file; a `ValueError` if it is of another type, negative, or
    past 63 bits.
    """
    # `isinstance` would accept True.
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise ValueError(f"a size or an offset is {value!r:.40}")
    return value


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Compute strides in elements, as torch counts them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        # torch counts an axis of size 0 as 1.
        step *= max(size, 1)
    return tuple(reversed(strides))


def compute_extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Compute the number of elements from a tensor's first to its last in the file."""
    if 0 in shape:
        return 0
    last = 0
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
    return last + 1


def _bytes(tensor: torch.Tensor) -> memoryview:
    # Through uint8, as numpy has no bfloat16.
    return tensor.view(-1).view(DType.UINT8.torch).numpy().data
