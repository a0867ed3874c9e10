"""A quantization in one format, or in several from one solution: each has a folder in the
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The formats in which a source is written.

    Attributes:
        dst: the folder, or file, to create.
        prepared_by_folder: the result in each format, by its folder in `dst`; a single one is `dst`
            itself, and its key is ``""``.
    """

    dst: Path
    prepared_by_folder: Mapping[str, Prepared]

    @classmethod
    def of(cls, prepared: Prepared) -> Formats:
        """Prepare the formats that the options request.

        Raises `UnsupportedError` if one does not support a scheme.
        """
        targets = prepared.options.targets
        if len(targets) == 1:
            return cls(prepared.dst, {"": prepared})
        prepared_by_folder = {}
        for target in targets:
            with _prefix_errors(target.name):
                prepared_by_folder[target.name] = prepared.in_format(target)
        return cls(prepared.dst, prepared_by_folder)

    @property
    def first(self) -> Prepared:
        return next(iter(self.prepared_by_folder.values()))

    @cached_property
    def blocks(self) -> list[TensorBlock]:
        """List the tensors of the output, in order: of each decoder block those in one format
        after the other.

        Raises:
            UnsupportedError: if the formats do not have the tensors in the same order of decoder
                blocks.
        """
        result: list[TensorBlock] = []
        blocks_by_format = [prepared.blocks for prepared in self.prepared_by_folder.values()]
        # A block is solved once and written in all formats before the next one is solved.
        for row in zip_longest(*blocks_by_format):
            layers = {block.layer for block in row if block is not None}
            # None fills the row of a format that has fewer blocks.
            if None in row or len(layers) > 1:
                raise UnsupportedError(
                    f"{' and '.join(self.prepared_by_folder)} order the layers differently, and"
                    " cannot be written together",
                    path=self.first.source.path,
                    hint="write them with separate commands",
                )
            for name, block in zip(self.prepared_by_folder, row, strict=True):
                result.append(replace(block, folder=name))
        return result

    @cached_property
    def encoder(self) -> Encoder:
        """Build the encoder of the output. Raises an `UnsupportedError`, which names the format, if
        one cannot represent the model exactly.
        """
        encoders = {}
        for name, prepared in self.prepared_by_folder.items():
            with _prefix_errors(name):
                encoders[name] = prepared.encoder
        if "" in encoders:
            return encoders[""]
        planned: list[tuple[str, TensorSpec]] = []
        for block in self.blocks:
            for spec in block.tensors:
                planned.append((block.folder, spec))
        return FoldersEncoder(planned, encoders)

    @cached_property
    def side_files(self) -> Mapping[str, bytes | Path]:
        """Collect the files next to the weights. Raises `UnsupportedError` as `encoder` does."""
        files = {}
        for name, prepared in self.prepared_by_folder.items():
            with _prefix_errors(name):
                files[name] = prepared.side_files
        return merge_by_folder(files)

    def work(self, works: Mapping[str, Work]) -> Work:
        """Combine the works of all formats, given by folder."""
        if "" in works:
            return works[""]
        first = next(iter(works.values()))
        options = {**first.options, "to": list(works)}
        return replace(first, encoder=self.encoder, side_files=self.side_files, options=options)


@contextmanager
def _prefix_errors(name: str) -> Iterator[None]:
    """Let an error about a format begin with the format's name."""
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
