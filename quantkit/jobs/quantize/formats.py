"""A quantization in one format, or in several from one solution: each has a folder in the
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from quantkit.calibration.quantizers import TensorBlock
from quantkit.errors import UnsupportedError
from quantkit.formats.container import Encoder
from quantkit.formats.folders_encoder import FoldersEncoder, merge_by_folder
from quantkit.jobs.output.writer import Work
from quantkit.jobs.quantize.prepare import Prepared
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class Formats:
    """What is to be written of a source.

    Attributes:
        dst: the folder, or file, to create.
        each: the result in each format, by its folder in `dst`; a single one is `dst` itself, and
            its key is ``""``.
    """

    dst: Path
    prepared_by_folder: Mapping[str, Prepared]

    @classmethod
    def of(cls, prepared: Prepared) -> Formats:
        """Return the formats that the options request.

        Raises `UnsupportedError` if one does not support a scheme.
        """
        targets = prepared.options.targets
        if len(targets) == 1:
            return cls(prepared.dst, {"": prepared})
        each = {}
        for target in targets:
            with _prefix_errors(target.name):
                each[target.name] = prepared.in_format(target)
        return cls(prepared.dst, each)

    @property
    def first(self) -> Prepared:
        return next(iter(self.prepared_by_folder.values()))

    @cached_property
    def blocks(self) -> list[TensorBlock]:
        """Return the tensors of the output, in order: of each decoder block those in one format
        after the other.

        Raises:
            UnsupportedError: if the formats do not have the tensors in the same order of decoder
                blocks.
        """
        result = []
        for row in zip_longest(*(one.blocks for one in self.prepared_by_folder.values())):
            if len({None if block is None else block.layer for block in row}) > 1 or None in row:
                raise UnsupportedError(
                    f"{' and '.join(self.prepared_by_folder)} have the layers in another order,"
                    " and cannot be written together",
                    path=self.first.source.path,
                    hint="write them one after the other",
                )
            result += [
                replace(block, folder=name)
                for name, block in zip(self.prepared_by_folder, row, strict=True)
            ]
        return result

    @cached_property
    def encoder(self) -> Encoder:
        """Raises an `UnsupportedError`, which names the format, if one cannot hold the model
        exactly.
        """
        encoders = {}
        for name, one in self.prepared_by_folder.items():
            with _prefix_errors(name):
                encoders[name] = one.encoder
        if "" in encoders:
            return encoders[""]
        planned: Sequence[tuple[str, TensorSpec]] = [
            (block.folder, spec) for block in self.blocks for spec in block.tensors
        ]
        return FoldersEncoder(planned, encoders)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Return the files next to the weights; an `UnsupportedError` as from `encoder`."""
        files = {}
        for name, one in self.prepared_by_folder.items():
            with _prefix_errors(name):
                files[name] = one.side_files
        return merge_by_folder(files)

    def work(self, works: Mapping[str, Work]) -> Work:
        """Return what is to be written, given that of each format, by folder."""
        if "" in works:
            return works[""]
        first = next(iter(works.values()))
        options = {**first.options, "to": list(works)}
        return replace(first, encoder=self.encoder, side_files=self.side_files, options=options)


@contextmanager
def _prefix_errors(name: str) -> Iterator[None]:
    """Let an error of what a format cannot hold begin with the format's name."""
    try:
        yield
    except UnsupportedError as error:
        if not name or name in error.problem:
            raise
        raise type(error)(
            f"{name}: {error.problem}",
            path=error.path,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        ) from error
