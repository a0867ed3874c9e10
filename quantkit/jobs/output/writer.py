"""The writer of checkpoints that all jobs share: atomic, durable, resumable, with the sha256 of
every file.

Files grow in the background (`Sink`) in ``DST.partial`` (`Staging`), whose journal says up to where
they can be trusted. The source is checked and hashed meanwhile, the result is read back, and the
manifest is written last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.base.messages import Message
from quantkit.base.progress import Progress, in_phase
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    NonFiniteError,
    QualityError,
    QuantkitError,
    ResumeError,
    UnsupportedError,
)
from quantkit.files.hub_names import read_origin
from quantkit.files.safetensors_io import require_readable
from quantkit.formats import manifest
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.container import Encoder, StoredCheckpoint, Written
from quantkit.formats.detect import open_finished_or_not, with_codes
from quantkit.formats.folder import TOKENIZER_FILES, code_files, json_bytes, tokenizer_files
from quantkit.formats.folders_encoder import in_folder, select_folder
from quantkit.formats.output.destination import (
    JOURNAL,
    MANIFEST,
    build_not_ours_error,
    list_placed_files,
)
from quantkit.formats.output.journal import SafePoint
from quantkit.formats.output.sink import Sink
from quantkit.formats.output.staging import Staging, note_partial_output
from quantkit.quality.measures import Hidden
from quantkit.quality.source_check import SourceCheck, check_source
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.version import __version__
from quantkit.via_transformers.forward import final_hidden
from quantkit.via_transformers.stacks import unstack_as

SAFE_POINT_BYTES = 256 << 20
"""The writer makes a checkpoint after this many bytes."""
NOT_CHECKED = "skipped as requested"
"""The manifest's ``source_check`` without one."""
_SOURCE_ERRORS = (CheckpointError, NonFiniteError, UnsupportedError)
"""Errors of the source: another run would end with them too, so nothing is kept of an output
that is not complete.
"""
_HINTED_ERRORS = (DestinationError, QualityError, ResumeError)
"""Errors whose hints say what to do with the partial output."""
_DESTINATION_ERRORS = (DestinationError, ResumeError)
"""Errors of the destination: what is in the partial folder is not removed, as it may be another
run's, or a user's.
"""


@dataclass(frozen=True)
class Work:
    """What a job writes.

    Attributes:
        side_files: the files that go with the weights, by name: content, or a file to copy.
        options: all options that determine the bytes of the weights.
        computed_by: what else determines these bytes: properties of the machine, a fingerprint of
            the samples, and the number of processes.
        scratch_bytes: temporary space that the job needs on the destination's disk.
    """

    job: str
    source: StoredCheckpoint
    encoder: Encoder
    side_files: Mapping[str, bytes | Path]
    options: Mapping[str, object]
    computed_by: Mapping[str, object] = field(default_factory=dict)
    scratch_bytes: int = 0

    def fingerprint(self, copied_hashes: Mapping[str, str]) -> dict[str, object]:
        """Collect what a run must have in common with the interrupted run that it resumes."""
        fingerprint: dict[str, object] = {
            "job": self.job,
            "quantkit": __version__,
            # Not the hashes of whole files, which are known only after all were read.
            "source": manifest.identity(self.source.files()),
        }
        for option, value in self.options.items():
            fingerprint[option_key(option)] = value
        for name, content in self.side_files.items():
            if isinstance(content, bytes) and PurePosixPath(name).name in TOKENIZER_FILES:
                fingerprint[f"file {name}"] = content_hash(content)
        fingerprint.update(self.computed_by)
        for name, digest in copied_hashes.items():
            fingerprint[f"file {name}"] = digest
        return fingerprint


def start_source_hashes(source: StoredCheckpoint) -> manifest.SourceHashes:
    """Start to hash all files of a source that an output depends on."""
    path = source.path
    if path.is_dir():
        root = path
        extra_files = tokenizer_files(path)
    else:
        root = path.parent
        # A single file contains its tokenizer.
        extra_files = []
    return manifest.SourceHashes([*source.files(), *extra_files, *code_files(source)], root)


def option_key(name: str) -> str:
    """Build the key of an option in a fingerprint."""
    return f"option {name}"


@contextmanager
def open_writer(
    work: Work,
    dst: Path,
    *,
    resume: bool,
    source_check: bool,
    source_hidden: Hidden = final_hidden,
    progress: Progress,
) -> Iterator[Writer]:
    """Open the writer of a new checkpoint or of an interrupted one, and check the source on a
    sample text, with the hidden states that `source_hidden` returns.

    An error of the source while tensors are written removes the partial output, as it would occur
    again. Anything else keeps it for ``resume``, if it has any tensor: an interruption, a full
    disk, a bug. Once all files are written, every error keeps it, because only checks follow, and
    ``resume`` repeats these alone.

    Raises:
        QuantkitError: see `Staging` and `check_source`.
    """
    writer = Writer(work, dst, resume=resume, progress=progress)
    try:
        writer.hash_and_check_source(check=source_check, source_hidden=source_hidden)
        yield writer
    except BaseException as error:
        writer.abandon(error)
        raise


class Writer:
    """Writes a checkpoint: `put` each tensor in the encoder's order, then `seal`, then `commit`.

    Of checkpoints in several folders of one output: after `finish`, `read_back` and `add_manifest`
    each, then `place`.

    Attributes:
        path: the folder under construction.
        done: the number of tensors that an interrupted run has written.
        records: what was recorded with tensors, by name; complete once sealed.
    """

    def __init__(self, work: Work, dst: Path, *, resume: bool, progress: Progress) -> None:
        """Open the partial output; `open_writer` also closes it."""
        self._work = work
        self._encoder = work.encoder
        self._progress = progress
        # Compared again when the files are copied: they could change in between.
        self._copied_hashes: dict[str, str] = {}
        for name, content in work.side_files.items():
            if isinstance(content, Path):
                self._copied_hashes[name] = content_hash(content)
        fingerprint = work.fingerprint(self._copied_hashes)
        files = list_placed_files(dst, self._encoder.files())
        self._writes_folder = files is None
        if work.side_files and not self._writes_folder:
            raise ValueError("only a folder can have side files")
        if files is None:
            self._manifest_name = MANIFEST
        else:
            self._manifest_name = files[0]
        needed = self._encoder.total_bytes() + work.scratch_bytes
        # Of several formats: each is a folder in the output.
        folders = {name.rpartition("/")[0] for name in self._encoder.files()} - {""}
        self._staging = Staging(
            dst, fingerprint, needed, resume=resume, files=files, folders=folders
        )
        self.path = self._staging.path
        self.records: dict[str, Any] = {}
        self._unsaved_records: dict[str, Any] = {}
        self._unsaved_bytes = 0
        self._hashes: dict[str, str] = {}
        self._manifests: list[str] = []
        self._source_hashes: dict[str, str] = {}
        self._source_check: SourceCheck | str = NOT_CHECKED
        self._is_complete = False
        try:
            last = self._last_safe_point()
            self._sink = Sink(self._staging.folder, last.files, last.sha256, progress=progress)
        except BaseException as error:
            self._mark_kept(error)
            self._staging.close()
            raise
        self.done = last.tensors
        self._next = last.tensors
        self._layer_ends = _layer_ends(work)

    @property
    def existing_tensors(self) -> Written:
        """Open the tensors that an interrupted run has written."""
        return Written(self._encoder, self.path, self.done)

    @property
    def missing(self) -> list[TensorSpec]:
        """List the tensors still to put, in order."""
        return list(self._encoder.planned[self._next :])

    @property
    def notes(self) -> list[str]:
        """Collect what the check of the source found that the user should know."""
        if isinstance(self._source_check, SourceCheck):
            note = self._source_check.note()
        else:
            note = None
        if note is None:
            return []
        return [Message(f"{self._work.source.path}: ", note)]

    def hash_and_check_source(self, *, check: bool, source_hidden: Hidden) -> None:
        """Hash the source in the background, and `check` it on a sample text; see
        `check_source`.
        """
        source = self._work.source
        # Hashing takes about as long as reading, so it runs beside the check and the job.
        self._hashing = start_source_hashes(source)
        if check:
            outcome = check_source(
                source,
                allow_nonfinite=self._work.options["allow_nonfinite"] is True,
                source_hidden=source_hidden,
                progress=in_phase(self._progress, "check of the source"),
            )
            # A source without a tokenizer, for example, is not measured; a text says why.
            if isinstance(outcome, SourceCheck):
                self._source_check = outcome
            else:
                self._source_check = f"not measured: {outcome}"

    def put(
        self, name: str, value: Tensor | QuantTensor, record: Mapping[str, object] | None = None
    ) -> None:
        """Append the next tensor, with its record for the manifest.

        Raises:
            CheckpointError: if the source turns out to be damaged.
            DestinationError: if the disk is full or a write failed.
            RuntimeError: if it is not the encoder's next tensor.
        """
        self._hashing.require_sound()
        expected = self._encoder.planned[self._next].name
        if name != expected:
            raise RuntimeError(f"tensor '{name}' was put, but '{expected}' is the next one")
        for file, data in self._encoder.encode(self._next, value):
            self._sink.append(file, data)
            self._unsaved_bytes += len(data)
        if record is not None:
            self._unsaved_records[name] = record
        self._next += 1
        # The parts of a tensor that the encoder holds are lost if the process ends.
        if self._unsaved_bytes >= SAFE_POINT_BYTES and not self._encoder.holds:
            self.record_safe_point()
        self.report_progress()

    def report_progress(self) -> None:
        """Report how many layers are written."""
        layers = sum(end < self._next for end in self._layer_ends)
        self._progress(self._work.job, layers, self._work.source.config.num_layers, "layers")

    def record_safe_point(self) -> None:
        """Make all tensors so far durable, so that a later run continues from here.

        Raises:
            DestinationError: if the disk is full or a write failed.
            RuntimeError: if only some parts of a tensor on disk were put.
        """
        if self._encoder.holds:
            raise RuntimeError(
                f"a checkpoint among the parts of one tensor on disk, after {self._next} tensors"
            )
        # The journal may name only bytes that are on the disk, so they are synced first.
        sizes = self._sink.sync()
        point = SafePoint(
            tensors=self._next,
            files=sizes,
            sha256=self._sink.hashes(),
            state=self._encoder.state(),
            records=self._unsaved_records,
        )
        self._staging.record(asdict(point))
        # The journal has each record once: a safe point lists those since the last one.
        self.records.update(self._unsaved_records)
        self._unsaved_records = {}
        self._unsaved_bytes = 0

    def seal(self) -> StoredCheckpoint:
        """Complete the weights, write the side files, and open the result.

        Raises:
            CheckpointError: if the source changed since it was opened.
            DestinationError: if a write failed, or the result cannot be read back.
        """
        self.finish()
        return self.read_back()

    def finish(self) -> None:
        """Complete the weights and write the side files, as `seal` does, without opening the
        result.
        """
        # Fails if the source changed, before the output looks complete.
        self._source_hashes = self._hashing.result(self._progress)
        self.record_safe_point()
        for name, data in self._encoder.finish():
            self._sink.append(name, data)
        self._sink.sync()
        self._hashes = self._sink.close()
        for name, source_file in self._work.side_files.items():
            if isinstance(source_file, bytes):
                self._add_file(name, source_file)
                continue
            self._add_file(name, _content(source_file))
            if self._hashes[name] != self._copied_hashes[name]:
                raise CheckpointError("the source changed while it was read", path=source_file)
        for name, content in self._encoder.extra_files().items():
            self._add_file(name, content)
        # Somebody may have moved the folder while it was written.
        self._staging.require_in_place()
        self._is_complete = True

    def read_back(self, folder: str = "") -> StoredCheckpoint:
        """Open the result, or that in one of its folders.

        Raises `DestinationError` if it cannot be read back.
        """
        if self._writes_folder:
            path = self.path / folder
        else:
            path = self.path / self._encoder.files()[0]
        return _read_back(path, self._work.source.config)

    def commit(
        self, details: Mapping[str, object], files: Mapping[str, bytes] | None = None
    ) -> dict[str, Any]:
        """Write the manifest, which it returns, and rename the output to its final name; see
        `add_manifest`.
        """
        written = self.add_manifest(details, files)
        self.place()
        return written

    def add_manifest(
        self,
        details: Mapping[str, object],
        files: Mapping[str, bytes] | None = None,
        folder: str = "",
    ) -> dict[str, Any]:
        """Write the manifest, which it returns.

        Args:
            details: the job's part of the manifest.
            files: further side files, if the output is a folder.
            folder: the folder in the output that it is for.
        """
        if self._writes_folder and files is not None:
            for name, content in files.items():
                self._add_file(in_folder(folder, name), content)
        if isinstance(self._source_check, SourceCheck):
            source_check: object = asdict(self._source_check)
        else:
            source_check = self._source_check
        source = self._work.source
        written = manifest.build(
            self._work.job,
            source.format,
            self._source_hashes,
            dict(sorted(select_folder(folder, self._hashes).items())),
            {"source_check": source_check, **details},
            read_origin(source.path),
        )
        name = in_folder(folder, self._manifest_name)
        self._staging.folder.write(name, json_bytes(written))
        self._manifests.append(name)
        return written

    def place(self) -> None:
        """Rename the output, with its manifests, to its final name."""
        self._staging.commit({*self._hashes, *self._manifests})

    def abandon(self, error: BaseException) -> None:
        """Close the output after an error; keep it if another run can continue from it, else
        remove it.
        """
        self._sink.abandon()
        if self._is_worth_keeping(error):
            self._mark_kept(error)
            self._staging.close()
        else:
            self._staging.discard()
            # After an interruption users may look for a partial output. The note says that there
            # is none.
            if not isinstance(error, QuantkitError):
                note_partial_output(error, self.path)

    def _is_worth_keeping(self, error: BaseException) -> bool:
        """Check whether another run can continue from what is written, or may not remove it."""
        if self._is_complete or isinstance(error, _DESTINATION_ERRORS):
            return True
        return self._next > 0 and not isinstance(error, _SOURCE_ERRORS)

    def _add_file(self, name: str, content: bytes) -> None:
        self._staging.folder.write(name, content)
        self._hashes[name] = content_hash(content)

    def _mark_kept(self, error: BaseException) -> None:
        """Note on an error that the output is kept, unless its hint says so."""
        if not isinstance(error, _HINTED_ERRORS) and self._staging.folder.is_at(self.path):
            note_partial_output(error, self.path)

    def _last_safe_point(self) -> SafePoint:
        last = SafePoint(tensors=0, files={}, sha256={}, state=None, records={})
        names = frozenset(spec.name for spec in self._encoder.planned)
        # Entries of another form are those of a journal that no such run wrote.
        try:
            for entry in self._staging.entries:
                last = SafePoint.from_json(entry, names, self._encoder.files())
                self.records.update(last.records)
            if self._staging.entries:
                self._encoder.restore(last.state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise build_not_ours_error(self.path / JOURNAL) from error
        return last


def _layer_ends(work: Work) -> set[int]:
    """Find the index of each layer's last tensor; what follows the last layer counts as part of
    it.
    """
    planned = work.encoder.planned
    layers = {parameter.name: parameter.layer for parameter in parameters(work.source.config)}
    last_indices: dict[int, int] = {}
    for index in range(len(planned)):
        layer = layers.get(work.encoder.canonical_name(index))
        if layer is not None:
            last_indices[layer] = index
    ends = sorted(last_indices.values())
    return {*ends[:-1], len(planned) - 1}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from error


def content_hash(content: bytes | Path) -> str:
    """Compute the sha256 of a side file."""
    if isinstance(content, Path):
        content = _content(content)
    return sha256(content).hexdigest()


def _read_back(path: Path, config: ModelConfig) -> StoredCheckpoint:
    """Open what was written of a source with a config, by our reader and by the safetensors
    library; headers only.

    Raises:
        DestinationError: if the files are not the model of the config: something changed them.
        RuntimeError: if the library finds other tensors.
    """
    try:
        result = with_codes(open_finished_or_not(path, tensors_only=not config.runnable))
        unstack_as(result, config)
        # A second reader that was not written for these files.
        for file in sorted(path.glob("*.safetensors")):
            require_readable(file)
    except CheckpointError as error:
        raise DestinationError(
            f"cannot be read back: {error.problem}",
            path=error.path,
            found=error.found,
            expected=error.expected,
        ) from error
    return result


def model_summary(source: Checkpoint, dtype: str) -> dict[str, object]:
    """Collect the manifest's main facts about a model."""
    return {
        "architecture": source.config.architecture,
        "parameters": parameter_count(source),
        "dtype": dtype,
    }
