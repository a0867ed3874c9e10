"""Several results of one run, each in a folder of the output: written by one encoder that
combines theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from quantkit.formats.codecs.codec import Weight
from quantkit.formats.container import Chunk, Encoder
from quantkit.tensors.spec import TensorSpec

_Value = TypeVar("_Value")


class FoldersEncoder(Encoder):
    """Encodes the tensors of several results. Its files are ``folder/file``, and its tensors
    ``folder/name``; each encoder gets its own tensors in its own order.
    """

    def __init__(
        self, planned: Sequence[tuple[str, TensorSpec]], encoders: Mapping[str, Encoder]
    ) -> None:
        """
        Args:
            planned: the tensors of all encoders, each with its folder, in the order in which they
                are encoded.
            encoders: by folder.

        Raises:
            ValueError: if the tensors of a folder are not those that its encoder plans, in this
                order.
        """
        self._encoders = dict(encoders)
        planned_by_name: list[TensorSpec] = []
        self._places: list[tuple[str, int]] = []
        # Encoders only append, so each must get its tensors in its own order.
        counts: Counter[str] = Counter()
        for folder, spec in planned:
            number = counts[folder]
            if encoders[folder].planned[number].name != spec.name:
                raise ValueError(f"{folder}: '{spec.name}' is not tensor number {number}")
            planned_by_name.append(replace(spec, name=in_folder(folder, spec.name)))
            self._places.append((folder, number))
            counts[folder] += 1
        self.planned = planned_by_name
        for folder, encoder in encoders.items():
            if counts[folder] != len(encoder.planned):
                raise ValueError("some tensors of a folder are not planned")

    @property
    def rearranges(self) -> bool:
        return any(encoder.rearranges for encoder in self._encoders.values())

    @property
    def max_buffered_bytes(self) -> int:
        return max(encoder.max_buffered_bytes for encoder in self._encoders.values())

    @property
    def holds(self) -> bool:
        return any(encoder.holds for encoder in self._encoders.values())

    def total_bytes(self) -> int:
        return sum(encoder.total_bytes() for encoder in self._encoders.values())

    def files(self) -> Sequence[str]:
        files: list[str] = []
        for folder, encoder in self._encoders.items():
            for name in encoder.files():
                files.append(in_folder(folder, name))
        return files

    def canonical_name(self, index: int) -> str:
        folder, number = self._places[index]
        return self._encoders[folder].canonical_name(number)

    def headers(self) -> Mapping[str, bytes]:
        headers: dict[str, Mapping[str, bytes]] = {}
        for folder, encoder in self._encoders.items():
            headers[folder] = encoder.headers()
        return merge_by_folder(headers)

    def encode(self, index: int, value: Weight) -> Iterator[Chunk]:
        folder, number = self._places[index]
        for name, data in self._encoders[folder].encode(number, value):
            yield in_folder(folder, name), data

    def decode(self, index: int, folder: Path) -> Weight:
        subfolder, number = self._places[index]
        return self._encoders[subfolder].decode(number, folder / subfolder)

    def finish(self) -> Iterator[Chunk]:
        for folder, encoder in self._encoders.items():
            for name, data in encoder.finish():
                yield in_folder(folder, name), data

    def state(self) -> Any:
        # By folder, because a run that resumes may name the formats in another order.
        return {folder: encoder.state() for folder, encoder in self._encoders.items()}

    def restore(self, state: Any) -> None:
        for folder, encoder in self._encoders.items():
            encoder.restore(state[folder])

    def extra_files(self) -> dict[str, bytes]:
        files: dict[str, dict[str, bytes]] = {}
        for folder, encoder in self._encoders.items():
            files[folder] = encoder.extra_files()
        return merge_by_folder(files)


def in_folder(folder: str, name: str) -> str:
    """Prefix the name of a file, or of a tensor, with its folder in an output; ``""`` is the output
    itself.
    """
    if folder:
        return f"{folder}/{name}"
    return name


def select_folder(folder: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Select the values of a folder, by the names in the folder, from those by the names in the
    output.
    """
    prefix = in_folder(folder, "")
    folder_values: dict[str, _Value] = {}
    for name, value in values.items():
        if name.startswith(prefix):
            folder_values[name.removeprefix(prefix)] = value
    return folder_values


def merge_by_folder(by_folder: Mapping[str, Mapping[str, _Value]]) -> dict[str, _Value]:
    """Merge values by the names in each folder to values by the names in the output."""
    merged: dict[str, _Value] = {}
    for folder, folder_values in by_folder.items():
        for name, value in folder_values.items():
            merged[in_folder(folder, name)] = value
    return merged
