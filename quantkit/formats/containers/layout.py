"""Where encoders put tensors: which planned tensors make up one on disk, in which file it is, and at which offset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantkit.architectures.disk import DiskTensor
from quantkit.errors import UnsupportedError
from quantkit.tensors.spec import TensorSpec

Unit = tuple[DiskTensor, int, TensorSpec]
"""A tensor on disk, the index of its first part among the planned tensors, and its name on disk, shape and type."""


def units_of(planned: Sequence[TensorSpec], tensors: Iterable[DiskTensor]) -> list[Unit]:
    """The tensors on disk that planned tensors make up, in the order of the plan.

    Raises:
        UnsupportedError: if the parts of one differ in scheme or float type.
        ValueError: if they do not follow each other in the plan, or planned tensors are left over.
    """
    index_of = {spec.name: index for index, spec in enumerate(planned)}
    found, used = [], set[int]()
    for tensor in tensors:
        first = index_of.get(tensor.parts[0], len(planned))
        parts = planned[first : first + len(tensor.parts)]
        if tuple(part.name for part in parts) != tensor.parts:
            raise ValueError(f"{tensor.parts[0]} and what follows it are not planned in the order of '{tensor.name}'")
        found.append((tensor, first, _joined_spec(tensor, parts)))
        used.update(range(first, first + len(parts)))
    if len(used) != len(planned):
        raise ValueError(f"{next(s.name for i, s in enumerate(planned) if i not in used)} is in no tensor on disk")
    return sorted(found, key=lambda unit: unit[1])


def _joined_spec(tensor: DiskTensor, parts: Sequence[TensorSpec]) -> TensorSpec:
    first = parts[0]
    for part in parts[1:]:
        if (part.dtype, part.scheme) != (first.dtype, first.scheme):
            raise UnsupportedError(
                f"'{first.name}' and '{part.name}' are one tensor on disk, '{tensor.name}', but differ",
                found=f"{first.scheme or first.dtype} and {part.scheme or part.dtype}",
                hint="convert the source to one float type first",
            )  # fmt: skip
    return TensorSpec(tensor.name, tensor.shape, first.dtype, first.scheme)


def file_numbers(sizes: Iterable[int], max_bytes: int, *, first: int = 0, others: int = 0) -> list[int]:
    """The number of the file that each tensor goes to, if files are filled in order.

    Args:
        first, others: bytes of the first file, and of each other one, besides its tensors.
    """
    numbers: list[int] = []
    number, filled = 0, first
    for size in sizes:
        if numbers and filled + size > max_bytes:
            number, filled = number + 1, others
        numbers.append(number)
        filled += size
    return numbers


def offsets(sizes: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Where each tensor begins after the header of its file."""
    found: list[int] = []
    for index, number in enumerate(numbers):
        same_file = index > 0 and numbers[index - 1] == number
        found.append(found[-1] + sizes[index - 1] if same_file else 0)
    return found
