"""Write a checkpoint: atomic, durable, resumable, with the sha256 of every file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from quantkit.errors import DestinationError, QualityError, QuantkitError
from quantkit.formats.encoders import Encoder
from quantkit.formats.sink import Sink
from quantkit.formats.staging import Staging
from quantkit.qtensor import QuantTensor

_CHECKPOINT_BYTES = 256 << 20


class CheckpointWriter:
    """Takes the planned tensors in order and, at the end, gives the folder its name.

    Use as a context manager. Leaving it by an error of the source removes the partial
    output, since it would fail again; an interruption, a full disk or a result that is
    not good enough keeps it for ``resume``.

    Attributes:
        path: the folder under construction.
        done: how many tensors an interrupted run has already left on disk.
        records: what was recorded with tensors, by name.
        hashes: the sha256 of every file that is complete, sorted by name.
    """

    def __init__(
        self, dst: Path, encoder: Encoder, fingerprint: Mapping[str, Any], *, needed_bytes: int, resume: bool
    ) -> None:
        """
        Raises:
            DestinationError, ResumeError: see `Staging`.
        """
        self._encoder = encoder
        self._staging = Staging(dst, fingerprint, needed_bytes, resume=resume)
        self.path = self._staging.path
        self.done = 0
        self.records: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        hashes: dict[str, str] = {}
        for entry in self._staging.entries:
            self.records.update(entry["records"])
        if self._staging.entries:
            last = self._staging.entries[-1]
            self.done = int(last["tensors"])
            sizes, hashes = last["files"], last["sha256"]
            encoder.restore(last["state"])
        self._next = self.done
        self._fresh: dict[str, Any] = {}
        self._since_checkpoint = 0
        try:
            self._sink = Sink(self._staging.path, sizes, hashes)
        except QuantkitError:
            self._staging.close()
            raise
        self._file_hashes: dict[str, str] = {}
        self._open = True

    def put(self, value: Tensor | QuantTensor, record: Any = None) -> None:
        """Append the next planned tensor, with what the manifest shall say of it.

        Raises:
            DestinationError: if the disk is full or a write failed.
        """
        for name, data in self._encoder.encode(self._next, value):
            self._sink.append(name, data)
            self._since_checkpoint += len(data)
        if record is not None:
            self._fresh[self._encoder.planned[self._next].name] = record
        self._next += 1
        if self._since_checkpoint >= _CHECKPOINT_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make everything so far durable, so that a later run resumes from here."""
        sizes = self._sink.sync()
        self._staging.record(
            {
                "tensors": self._next,
                "files": sizes,
                "sha256": self._sink.hashes(),
                "state": self._encoder.state(),
                "records": self._fresh,
            }
        )
        self.records.update(self._fresh)
        self._fresh = {}
        self._since_checkpoint = 0

    def seal(self, side_files: Mapping[str, bytes | Path]) -> None:
        """Complete the weights, and write what goes beside them: name to content, or to a file to copy."""
        self.checkpoint()
        for name, data in self._encoder.finish():
            self._sink.append(name, data)
        self._sink.sync()
        self._file_hashes = self._sink.close()
        self._open = False
        for name, content in {**side_files, **self._encoder.extra_files()}.items():
            self.add_file(name, content if isinstance(content, bytes) else content.read_bytes())

    def add_file(self, name: str, content: bytes) -> None:
        """Write one more file beside the sealed weights."""
        self._staging.write_file(name, content)
        self._file_hashes[name] = hashlib.sha256(content).hexdigest()

    @property
    def hashes(self) -> dict[str, str]:
        return dict(sorted(self._file_hashes.items()))

    def commit(self, manifest_name: str, manifest: bytes) -> None:
        """Write the manifest and give the folder its final name."""
        self._staging.write_file(manifest_name, manifest)
        self._staging.commit()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._open:
            self._sink.close()
            self._open = False
        if isinstance(error, QuantkitError) and not isinstance(error, (DestinationError, QualityError)):
            self._staging.discard()
        else:
            self._staging.close()
