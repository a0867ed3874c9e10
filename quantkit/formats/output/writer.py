"""Write a checkpoint: atomic, durable, resumable, with the sha256 of every file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from quantkit.errors import CheckpointError, DestinationError, QualityError, QuantkitError, ResumeError
from quantkit.formats.container import Encoder
from quantkit.formats.output.destination import MANIFEST, output_files
from quantkit.formats.output.journal import NAME as JOURNAL
from quantkit.formats.output.journal import SafePoint
from quantkit.formats.output.own_folder import not_ours
from quantkit.formats.output.sink import Sink
from quantkit.formats.output.staging import Staging, mark_kept
from quantkit.progress import Progress, silent
from quantkit.tensors.qtensor import QuantTensor

_CHECKPOINT_BYTES = 256 << 20
_KEEPS = (DestinationError, QualityError, ResumeError)
"""Errors after which another try may go on with what is there."""


@dataclass(frozen=True)
class Written:
    """The first tensors of an output under construction, which an interrupted run has left.

    Attributes:
        encoder: knows the tensors, and where they lie in the files.
        folder: where the files are.
        count: how many tensors are safely there.
    """

    encoder: Encoder
    folder: Path
    count: int = 0

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.encoder.planned[: self.count])

    @cached_property
    def _places(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.encoder.planned)}

    def load(self, name: str) -> Tensor | QuantTensor:
        """One of the tensors, read back."""
        return self.encoder.decode(self._places[name], self.folder)


class CheckpointWriter:
    """Takes the encoder's tensors in order and, at the end, gives the folder its name, or the files theirs.

    Use as a context manager. Leaving it by an error of the source removes the partial
    output, since it would fail again; an interruption, a full disk, something strange
    in the partial folder or a result that is not good enough keeps it for ``resume``.
    What is interrupted before the first tensor has nothing to keep, and is removed.

    Attributes:
        path: the folder under construction.
        in_folder: whether the output is one; else it is files beside each other.
        done: how many tensors an interrupted run has already left on disk.
        records: what was recorded with tensors up to the last checkpoint, by name.
        hashes: the sha256 of every file that is complete, sorted by name.
    """

    def __init__(
        self, dst: Path, encoder: Encoder, fingerprint: Mapping[str, Any], side_files: Mapping[str, bytes | Path], *,
        needed_bytes: int, resume: bool, progress: Progress = silent,
    ) -> None:  # fmt: skip
        """
        Args:
            dst: the folder to make, or the file.
            encoder: knows the tensors.
            fingerprint: inputs and options, JSON; a resumed run must have the same, and copy the same files.
            side_files: what goes beside the weights in a folder: name to content, or to a file to copy.
            needed_bytes: size of the output.
            resume: go on where an interrupted run stopped, if there is one.
            progress: told of the files that such a run has left.

        Raises:
            CheckpointError: if a side file cannot be read.
            RequestError, DestinationError, ResumeError: see `Staging`.
        """
        self._encoder = encoder
        self._side_files = side_files
        copied = {name: value for name, value in side_files.items() if isinstance(value, Path)}
        self._side_hashes = {name: _sha256(_content(path)) for name, path in copied.items()}
        beside = {f"file {name}": digest for name, digest in self._side_hashes.items()}
        files = output_files(dst, encoder.files())
        self.in_folder = files is None
        if side_files and not self.in_folder:
            raise ValueError("side files go with a folder")
        self._manifest_name = MANIFEST if files is None else files[0]
        self._staging = Staging(dst, {**fingerprint, **beside}, needed_bytes, resume=resume, files=files)
        self.path = self._staging.path
        self.records: dict[str, Any] = {}
        self._fresh: dict[str, Any] = {}
        self._since_checkpoint = 0
        self._file_hashes: dict[str, str] = {}
        try:
            last = self._taken_up()
            self._sink = Sink(self._staging.folder, last.files, last.sha256, progress=progress)
        except BaseException as error:
            self._mark(error)
            self._staging.close()
            raise
        self.done = self._next = last.tensors
        self._open = True

    def put(self, name: str, value: Tensor | QuantTensor, record: Mapping[str, object] | None = None) -> None:
        """Append a tensor, with what the manifest shall say of it.

        Raises:
            DestinationError: if the disk is full or a write failed.
            RuntimeError: if it is not the encoder's next one.
        """
        expected = self._encoder.planned[self._next].name
        if name != expected:
            raise RuntimeError(f"tensor '{name}' was given, and '{expected}' is the next one")
        for file, data in self._encoder.encode(self._next, value):
            self._sink.append(file, data)
            self._since_checkpoint += len(data)
        if record is not None:
            self._fresh[name] = record
        self._next += 1
        if self._since_checkpoint >= _CHECKPOINT_BYTES and not self._encoder.holds:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make everything so far durable, so that a later run resumes from here.

        Raises:
            RuntimeError: if some of a tensor's parts are not there yet.
        """
        if self._encoder.holds:
            raise RuntimeError(f"a checkpoint within the parts of a tensor, after {self._next} of them all")
        sizes = self._sink.sync()
        point = SafePoint(self._next, sizes, self._sink.hashes(), self._encoder.state(), self._fresh)
        self._staging.record(point.to_json())
        self.records.update(self._fresh)
        self._fresh = {}
        self._since_checkpoint = 0

    def seal(self) -> None:
        """Complete the weights, and write what goes beside them.

        Raises:
            CheckpointError: if a side file is not what it was when the writer was made.
            DestinationError: if the disk is full or a write failed.
        """
        self.checkpoint()
        for name, data in self._encoder.finish():
            self._sink.append(name, data)
        self._sink.sync()
        self._file_hashes = self._sink.close()
        self._open = False
        for name, value in self._side_files.items():
            content = value if isinstance(value, bytes) else _content(value)
            self.add_file(name, content)
            if isinstance(value, Path) and self._file_hashes[name] != self._side_hashes[name]:
                raise CheckpointError("the source changed while it was read", path=value)
        for name, content in self._encoder.extra_files().items():
            self.add_file(name, content)

    def require_in_place(self) -> None:
        """
        Raises:
            DestinationError: if `path` no longer leads to the folder that is written.
        """
        self._staging.require_in_place()

    def add_file(self, name: str, content: bytes) -> None:
        """Write one more file beside the sealed weights."""
        self._staging.folder.write(name, content)
        self._file_hashes[name] = _sha256(content)

    @property
    def hashes(self) -> dict[str, str]:
        return dict(sorted(self._file_hashes.items()))

    def commit(self, content: bytes) -> None:
        """Write the manifest and give the output its final name."""
        self._staging.folder.write(self._manifest_name, content)
        self._staging.commit({*self._file_hashes, self._manifest_name})

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._open:
            self._sink.abandon()
            self._open = False
        if self._is_of_use(error):
            self._mark(error)
            self._staging.close()
        else:
            self._staging.discard()

    def _is_of_use(self, error: BaseException) -> bool:
        """Whether another try may go on with what is there after an error."""
        return isinstance(error, _KEEPS) if isinstance(error, QuantkitError) else self._next > 0

    def _mark(self, error: BaseException) -> None:
        """Let an error that has no hint of its own, or an interruption, tell what is kept."""
        if not isinstance(error, QuantkitError) and self._staging.folder.is_at(self.path):
            mark_kept(error, self.path)

    def _taken_up(self) -> SafePoint:
        """Where an interrupted run stopped."""
        last = SafePoint(0, {}, {}, None, {})
        names = frozenset(item.name for item in self._encoder.planned)
        try:
            for entry in self._staging.entries:
                last = SafePoint.from_json(entry, names, self._encoder.files())
                self.records.update(last.records)
            if self._staging.entries:
                self._encoder.restore(last.state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise not_ours(self.path / JOURNAL) from error
        return last


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
