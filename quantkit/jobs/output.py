"""What all jobs that write a checkpoint share: the source is checked and hashed, the result read back, the manifest
written last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.errors import CheckpointError, DestinationError
from quantkit.files.hub import origin
from quantkit.files.safetensors_io import require_readable
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.container import Encoder, StoredCheckpoint
from quantkit.formats.detect import open_unfinished
from quantkit.formats.folder import TOKENIZER_FILES, tokenizer_files
from quantkit.formats.output.writer import CheckpointWriter
from quantkit.progress import Progress, in_phase
from quantkit.quality.source_check import SourceCheck, check_source
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.version import __version__

SHARD_BYTES = 2 << 30
"""Largest safetensors file written, unless one tensor is larger."""


@dataclass(frozen=True)
class Work:
    """What a job is to write.

    Attributes:
        job: its name.
        source: where it comes from.
        encoder: knows the tensors to write.
        side_files: what goes beside the weights: name to content, or to a file to copy.
        options: all that decides the weights' bytes besides the source.
        computed_by: what of the machine decides the weights' bytes; the manifest does not tell it.
        scratch_bytes: space that the job takes on the destination's disk for itself.
    """

    job: str
    source: StoredCheckpoint
    encoder: Encoder
    side_files: Mapping[str, bytes | Path]
    options: Mapping[str, object]
    computed_by: Mapping[str, object] = field(default_factory=dict)
    scratch_bytes: int = 0

    def fingerprint(self) -> dict[str, object]:
        """What a run must have in common with the interrupted one that it goes on with.

        Besides files that are copied, which the writer looks at: templates are written anew, in files of their own.
        """
        written = {name: content for name, content in self.side_files.items() if isinstance(content, bytes)}
        return {
            "job": self.job,
            "quantkit": __version__,
            "source": manifest.identity(self.source.files()),
            **{option_key(key): value for key, value in self.options.items()},
            **{f"file {name}": sha256(written[name]).hexdigest() for name in TOKENIZER_FILES if name in written},
            **self.computed_by,
        }


def option_key(name: str) -> str:
    """Under which a fingerprint has an option."""
    return f"option {name}"


@contextmanager
def writing(work: Work, dst: Path, *, resume: bool, source_check: bool, progress: Progress) -> Iterator[JobWriter]:
    """Begin a new checkpoint, or go on with an interrupted one, and look whether its source predicts a text at all.

    Leaving it by an error removes or keeps what is there, as `CheckpointWriter` does.

    Args:
        dst: the folder to make, or the file.
        source_check: whether to look.

    Raises:
        QuantkitError: of the kind that says what is wrong; see also `check_source`.
    """
    needed = work.encoder.total_bytes() + work.scratch_bytes
    with CheckpointWriter(
        dst, work.encoder, work.fingerprint(), work.side_files, needed_bytes=needed, resume=resume,
        progress=progress,
    ) as writer:  # fmt: skip
        path = work.source.path
        beside = tokenizer_files(path) if path.is_dir() else []  # a file holds its own
        folder = path if path.is_dir() else path.parent
        hashes = manifest.SourceHashes([*work.source.files(), *beside], folder)
        checked: SourceCheck | str = "skipped as asked"
        if source_check:
            checked = _checked(work, progress)
        yield JobWriter(work, writer, hashes, checked, progress)


class JobWriter:
    """A checkpoint that a job writes: tensors with `put`, then `seal`, then `commit`.

    Attributes:
        path: the folder under construction.
        done: how many tensors an interrupted run has left there.
        missing: the others, in order.
    """

    def __init__(
        self, work: Work, writer: CheckpointWriter, hashes: manifest.SourceHashes, checked: SourceCheck | str,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._work = work
        self._writer = writer
        self._hashes = hashes
        self._source_hashes: dict[str, str] = {}
        self._checked = checked
        self._progress = progress
        planned = work.encoder.planned
        self.path = writer.path
        self.done = writer.done
        self.missing: Sequence[TensorSpec] = planned[self.done :]
        layers = {one.name: one.layer for one in parameters(work.source.config)}
        last = {layers.get(spec.name): index for index, spec in enumerate(planned)}
        ends = sorted(index for layer, index in last.items() if layer is not None)
        self._ends = {*ends[:-1], len(planned) - 1}  # what follows the last layer counts with it
        self._next = self.done
        self._whole = sum(index < self.done for index in self._ends)

    def put(self, name: str, value: Tensor | QuantTensor, record: Mapping[str, object] | None = None) -> None:
        """Write the next tensor, with what the manifest shall say of it.

        Raises:
            CheckpointError: if the source turns out to be damaged.
            DestinationError: if the disk is full or a write failed.
        """
        self._hashes.require_sound()
        self._writer.put(name, value, record)
        self._whole += self._next in self._ends
        self._next += 1
        self.tell()

    def tell(self) -> None:
        """Tell how many layers are written."""
        self._progress(self._work.job, self._whole, self._work.source.config.num_layers, "layers")

    def checkpoint(self) -> None:
        """Make everything so far durable, so that a later run goes on from here."""
        self._writer.checkpoint()

    def seal(self) -> StoredCheckpoint:
        """Complete the weights and what goes beside them; the result, opened.

        Raises:
            CheckpointError: if the source changed since it was opened.
            DestinationError: if the result cannot be read back.
        """
        self._source_hashes = self._hashes.result(self._progress)
        self._writer.seal()
        self._writer.require_in_place()
        path = self.path if self._writer.in_folder else self.path / self._work.encoder.files()[0]
        return _read_back(path, tensors_only=not self._work.source.config.runnable)

    @property
    def notes(self) -> list[str]:
        """What one should know of the source, as a text went through it."""
        note = self._checked.note() if isinstance(self._checked, SourceCheck) else None
        return [] if note is None else [f"{self._work.source.path}: {note}"]

    @property
    def records(self) -> dict[str, Any]:
        """What was recorded with tensors, by name, of all runs; complete once sealed."""
        return self._writer.records

    def commit(self, details: Mapping[str, object], files: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        """Write the manifest and give the output its name.

        Args:
            details: the manifest's own part of the job.
            files: more to put beside the weights, if the output is a folder.

        Returns:
            What the manifest holds.
        """
        for name, content in (files or {}).items() if self._writer.in_folder else ():
            self._writer.add_file(name, content)
        checked, source = self._checked, self._work.source
        written = manifest.build(
            self._work.job, source.format, self._source_hashes, self._writer.hashes,
            {"source_check": checked.to_json() if isinstance(checked, SourceCheck) else checked, **details},
            origin(source.path),
        )  # fmt: skip
        self._writer.commit(manifest.encoded(written))
        return written


def _checked(work: Work, progress: Progress) -> SourceCheck | str:
    """What the source makes of a text, or why that was not measured."""
    allow_nonfinite = work.options["allow_nonfinite"] is True
    told = in_phase(progress, "check of the source")
    found = check_source(work.source, allow_nonfinite=allow_nonfinite, progress=told)
    return found if isinstance(found, SourceCheck) else f"not measured: {found}"


def _read_back(path: Path, *, tensors_only: bool) -> StoredCheckpoint:
    """What was written, opened by our reader and by the safetensors library; headers only.

    Raises:
        DestinationError: if ours finds another model than the config calls for: somebody changed the files.
        RuntimeError: if the library finds other tensors than ours.
    """
    try:
        result = open_unfinished(path, tensors_only=tensors_only)
        for file in sorted(path.glob("*.safetensors")):
            require_readable(file)
    except CheckpointError as error:
        raise DestinationError(
            f"cannot be read back: {error.problem}", path=error.path, found=error.found, expected=error.expected
        ) from error
    return result


def model_summary(source: Checkpoint, dtype: str) -> dict[str, object]:
    """The few facts about a model that a reader of the manifest looks for first."""
    return {"architecture": source.config.architecture, "parameters": parameter_count(source), "dtype": dtype}
