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
    follow each other in the plan, and are held until all are put.
    """

    _headers: Sequence[bytes]

    def __init__(
        self,
        planned: Sequence[TensorSpec],
        units: Sequence[_Unit],
        sizes: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """The units are in the order of the files, with the bytes of each, and the number of its
        file.
        """
        self.planned = planned
        self._units = units
        self._shard_of = numbers
        self._names: list[str] = []
        # After the header of the file.
        self._offsets: list[int] = []
        for index, number in enumerate(numbers):
            same_file = index > 0 and numbers[index - 1] == number
            self._offsets.append(self._offsets[-1] + sizes[index - 1] if same_file else 0)
        self._of_part: list[list[int]] = [[] for _ in planned]
        for number, unit in enumerate(units):
            for part in range(len(unit.tensor.places)):
                self._of_part[unit.first + part].append(number)
        self._pending_parts: list[Weight] = []

    @property
    def holds(self) -> bool:
        return bool(self._pending_parts)

    def files(self) -> Sequence[str]:
        return self._names

    def headers(self) -> Mapping[str, bytes]:
        return dict(zip(self._names, self._headers, strict=True))

    def encode(self, index: int, value: Weight) -> Iterator[Chunk]:
        for number in self._of_part[index]:
            unit = self._units[number]
            self._pending_parts.append(value)
            put = index - unit.first + 1
            if put % unit.at_once == 0:
                joined = assemble_tensor(unit.tensor, self._pending_parts)
                self._pending_parts = []
                yield from self._iter_chunks(number, put - unit.at_once, joined)

    def _iter_chunks(self, number: int, part: int, value: Weight) -> Iterator[Chunk]:
        """Yield what a tensor on disk, or an expert of one, appends: before the first of a file its
        header.

        Args:
            part: the number of the first of its parts in `value`.
        """
        shard = self._shard_of[number]
        if part == 0 and (number == 0 or self._shard_of[number - 1] != shard):
            yield self._names[shard], self._headers[shard]
        for data in self._encode_unit(self._units[number], part, value):
            yield self._names[shard], data

    @abstractmethod
    def _encode_unit(self, unit: _Unit, part: int, value: Weight) -> Iterator[bytes | memoryview]:
        """Return the bytes of a tensor on disk, or of an expert of one; see `_iter_chunks`."""


def units_of(
    planned: Sequence[TensorSpec], tensors: Iterable[DiskTensor]
) -> list[tuple[DiskTensor, int, TensorSpec]]:
    """Return the tensors on disk that planned tensors make up, with the index of their first part,
    and their name on disk, shape and type, in the order of the plan.

    Raises:
        UnsupportedError: if the parts of one differ in scheme or float type.
        ValueError: if they do not follow each other in the plan, or planned tensors are left over.
    """
    index_of = {spec.name: index for index, spec in enumerate(planned)}
    found = []
    used = set[int]()
    for tensor in tensors:
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
                stated = " and ".join(str(one.scheme or one.dtype) for one in (parts[0], part))
                raise UnsupportedError(
                    problem, found=stated, hint="convert the source to one float type first"
                )
        spec = TensorSpec(tensor.name, tensor.shape, parts[0].dtype, parts[0].scheme)
        found.append((tensor, first, spec))
        used.update(range(first, first + len(parts)))
    if len(used) != len(planned):
        raise ValueError(
            f"{next(s.name for i, s in enumerate(planned) if i not in used)} is in no tensor on"
            " disk"
        )
    return sorted(found, key=lambda unit: unit[1])


def assign_file_numbers(
    sizes: Iterable[int], max_bytes: int, *, first_overhead: int = 0, overhead: int = 0
) -> list[int]:
    """Return the number of the file that each tensor goes to, if files are filled in order.

    Args:
        first, others: bytes of the first file, and of each other one, besides its tensors.
    """
    numbers: list[int] = []
    number = 0
    filled = first_overhead
    for size in sizes:
        if numbers and filled + size > max_bytes:
            number = number + 1
            filled = overhead
        numbers.append(number)
        filled += size
    return numbers
