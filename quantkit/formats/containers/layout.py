"""Encoders of files with a header: which planned tensors make up one on disk, in which file and
where it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quantkit.architectures.disk import DiskTensor
from quantkit.errors import UnsupportedError
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.container import Chunk, Encoder
from quantkit.formats.containers.hf_parts import assemble_tensor
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class Unit:
    """A tensor on disk, or the several of a quantized module.

    Attributes:
        first: the index of its first part among the planned tensors.
        spec: its name on disk, shape, float type and scheme.
        at_once: how many parts are appended together: all, or those of one expert.
    """

    tensor: DiskTensor
    first: int
    spec: TensorSpec
    at_once: int


_Unit = TypeVar("_Unit", bound=Unit)


class ShardedEncoder(Encoder, Generic[_Unit]):
    """Files that are filled one after the other, each with a header. The parts of a tensor on disk
    follow each other in the plan, and are buffered until all have arrived.
    """

    _headers: Sequence[bytes]

    def __init__(
        self,
        planned: Sequence[TensorSpec],
        units: Sequence[_Unit],
        sizes: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """
        Args:
            units: in the order of the files.
            sizes: the bytes of each unit.
            numbers: the number of the file of each unit.
        """
        self.planned = planned
        self._units = units
        self._file_of_unit = numbers
        self._names: list[str] = []
        # After the header of the file.
        self._offsets: list[int] = []
        for index, number in enumerate(numbers):
            offset = 0
            if index > 0 and numbers[index - 1] == number:
                offset = self._offsets[-1] + sizes[index - 1]
            self._offsets.append(offset)
        # A list for each part: GGUF may store a tied embedding a second time, as the head.
        self._units_of_tensor: list[list[int]] = [[] for _ in planned]
        for number, unit in enumerate(units):
            for part in range(len(unit.tensor.places)):
                self._units_of_tensor[unit.first + part].append(number)
        self._pending_parts: list[Weight] = []

    @property
    def holds(self) -> bool:
        return bool(self._pending_parts)

    def files(self) -> Sequence[str]:
        return self._names

    def headers(self) -> Mapping[str, bytes]:
        return dict(zip(self._names, self._headers, strict=True))

    def encode(self, index: int, value: Weight) -> Iterator[Chunk]:
        for number in self._units_of_tensor[index]:
            unit = self._units[number]
            self._pending_parts.append(value)
            # Counted from the index, because an encoder that resumes has not seen earlier parts.
            part_count = index - unit.first + 1
            if part_count % unit.at_once == 0:
                joined = assemble_tensor(unit.tensor, self._pending_parts)
                # Cleared first, so that `holds` is false while the chunks are written.
                self._pending_parts = []
                yield from self._iter_chunks(number, part_count - unit.at_once, joined)

    def _iter_chunks(self, number: int, part: int, value: Weight) -> Iterator[Chunk]:
        """Yield what a tensor on disk, or an expert of one, appends: before the first of a file its
        header.

        Args:
            part: the number of the first of its parts in `value`.
        """
        shard = self._file_of_unit[number]
        if part == 0 and (number == 0 or self._file_of_unit[number - 1] != shard):
            yield self._names[shard], self._headers[shard]
        for data in self._encode_unit(self._units[number], part, value):
            yield self._names[shard], data

    @abstractmethod
    def _encode_unit(self, unit: _Unit, part: int, value: Weight) -> Iterator[bytes | memoryview]:
        """Encode a tensor on disk, or an expert of one, as bytes; see `_iter_chunks`."""


def plan_units(
    planned: Sequence[TensorSpec], tensors: Iterable[DiskTensor]
) -> list[tuple[DiskTensor, int, TensorSpec]]:
    """Combine planned tensors to tensors on disk, each with the index of its first part, and its
    name on disk, shape and type, in the order of the plan.

    Raises:
        UnsupportedError: if the parts of one differ in scheme or float type.
        ValueError: if they do not follow each other in the plan, or planned tensors are left over.
    """
    index_of = {spec.name: index for index, spec in enumerate(planned)}
    units: list[tuple[DiskTensor, int, TensorSpec]] = []
    used_indices: set[int] = set()
    for tensor in tensors:
        # An index beyond the plan selects no parts, so the check below fails.
        first = index_of.get(tensor.parts[0], len(planned))
        parts = planned[first : first + len(tensor.parts)]
        if tuple(part.name for part in parts) != tensor.parts:
            raise ValueError(
                f"{tensor.parts[0]} and what follows it are not planned in the order of"
                f" '{tensor.name}'"
            )
        for part in parts:
            if (part.dtype, part.scheme) != (parts[0].dtype, parts[0].scheme):
                problem = (
                    f"'{parts[0].name}' and '{part.name}' are one tensor on disk, '{tensor.name}',"
                    " but differ"
                )
                first_kind = parts[0].scheme or parts[0].dtype
                part_kind = part.scheme or part.dtype
                raise UnsupportedError(
                    problem,
                    found=f"{first_kind} and {part_kind}",
                    hint="convert the source to one float type first",
                )
        spec = TensorSpec(tensor.name, tensor.shape, parts[0].dtype, parts[0].scheme)
        units.append((tensor, first, spec))
        used_indices.update(range(first, first + len(parts)))
    for index, spec in enumerate(planned):
        if index not in used_indices:
            raise ValueError(f"{spec.name} is in no tensor on disk")
    return sorted(units, key=lambda unit: unit[1])


def assign_file_numbers(
    sizes: Iterable[int], max_bytes: int, *, first_overhead: int = 0, overhead: int = 0
) -> list[int]:
    """Assign each tensor to a file by its number, filling files in order.

    Args:
        first_overhead, overhead: bytes of the first file, and of each other one, besides its
            tensors.
    """
    numbers: list[int] = []
    number = 0
    filled = first_overhead
    for size in sizes:
        # The first file has a tensor in any case, and a tensor above the limit gets its own file.
        if numbers and filled + size > max_bytes:
            number = number + 1
            filled = overhead
        numbers.append(number)
        filled += size
    return numbers
