"""The folder in which an output is built: ``DST.partial``, next to ``DST``.

A journal in it says what is durably on disk, so that a killed run can be resumed. Only a complete
output is renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    InterruptedRunError,
    RequestError,
    ResumeError,
)
from quantkit.files.gguf_types import GGUF_SUFFIX, parse_part_stem
from quantkit.files.hub_names import PREFIX as HUB_PREFIX
from quantkit.files.located import PARTIAL
from quantkit.formats.output.destination import (
    JOURNAL,
    SPACE_MARGIN,
    WRITER,
    OwnFolder,
    build_not_ours_error,
    build_occupied_error,
    destination_errors,
    is_there,
    place_output,
    require_absent,
    require_space,
    sync_folder,
)

# Commands that only read models ask whether a folder is finished.
if TYPE_CHECKING:
    from quantkit.formats.output import journal, placed_files
else:
    placed_files = LateModule("quantkit.formats.output.placed_files")
    journal = LateModule("quantkit.formats.output.journal")

SCRATCH = ".activations"
"""The first part of the names of folders that only the run that made them uses."""
_KEPT = Message("is kept: add ", Option("resume", value=True))
_NOTHING = "nothing was written yet"
_JOBS = ("convert", "quantize")


class Staging:
    """An unfinished output, locked against a second writer.

    Attributes:
        dst: the final folder, or file.
        path, folder: the partial folder.
        entries: the journal of an interrupted run after its fingerprint.
    """

    def __init__(
        self,
        dst: Path,
        fingerprint: Mapping[str, Any],
        needed_bytes: int,
        *,
        resume: bool,
        spare_bytes: int = SPACE_MARGIN,
        files: Sequence[str] | None = None,
        folders: Collection[str] = (),
    ) -> None:
        """Create the partial folder, or open that of an interrupted run.

        Args:
            dst: the final folder, or file; it must not exist.
            fingerprint: inputs and options, JSON; a resumed run must have the same.
            needed_bytes: size of the whole output.
            resume: continue an interrupted run, if there is one.
            spare_bytes: of the disk that must stay free.
            files: of an output that is no folder: they are renamed to the folder of `dst`, in this
                order.
            folders: in an output that is a folder.

        Raises:
            RequestError: if `dst` cannot be the name of an output.
            DestinationError: if `dst` or one of the files exists, cannot be written or has too
                little space.
            InterruptedRunError: if there is an interrupted run and `resume` is not set.
            BeingWrittenError: if a job is writing there.
            ResumeError: if the interrupted run had different inputs or options, or the folder holds
                something else.
        """
        self.dst = dst
        self.path = name_partial_folder(dst)
        if files is None:
            self._placed = None
        else:
            self._placed = placed_files.PlacedFiles(dst.parent, files)
        require_output_absent(dst, files, self.path)
        require_room_to_build(self.path, resume=resume)
        with contextlib.ExitStack() as cleanup:
            self.folder = self._open_folder(needed_bytes, spare_bytes)
            cleanup.callback(self.folder.close)
            self._journal = journal.Journal(self.folder)
            cleanup.callback(self._journal.close)
            self._sweep()
            # The journal has the fingerprint as JSON reads it, with lists in place of tuples.
            entries = self._begin_or_check_journal(json.loads(json.dumps(fingerprint)))
            self.entries = [entry for entry in entries if placed_files.ENTRY not in entry]
            self.folder.add_folders(folders)
            if self._placed is not None:
                # Files of the interrupted run are moved back first, as they would count as present.
                self._placed.take_back(self.folder, entries)
                self._placed.require_absent()
            # A resumed run needs space only for what is not written yet.
            written_bytes = sum(self.folder.size(name) for name in self.folder.names())
            require_space(self.path, needed_bytes - written_bytes, spare_bytes)
            self._exit_stack = cleanup.pop_all()

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the journal and wait until it is on disk."""
        self._journal.append(entry)

    def require_in_place(self) -> None:
        """Raise a `DestinationError` if the folder is no longer at its path."""
        if not self.folder.is_at(self.path):
            raise DestinationError("was moved or replaced while it was written", path=self.path)

    def commit(self, files: Collection[str]) -> None:
        """Rename the finished output, which contains these files only, or its files, to the final
        name.

        Raises:
            DestinationError: if the name is in use by now, or the folder contains anything else.
            ResumeError: if something in it is no plain file.
        """
        self._sweep()
        # The file of the writer would be part of the model. The journal's lock stays.
        if WRITER in self.folder.names():
            self.folder.remove(WRITER)
        self._require_only(files)
        # The rename must not be on disk before the names in the folder.
        self.folder.sync()
        if self._placed is not None:
            try:
                self._placed.place(self.folder, self.record)
            finally:
                # All files can be in place although the call was interrupted.
                if self._placed.complete:
                    self.discard()
            return
        place_output(self.path, self.dst)
        # The model is complete: from here on nothing may fail. The journal is removed after the
        # rename, since a failed rename can only be repeated with it.
        with contextlib.suppress(OSError, DestinationError):
            sync_folder(self.dst.parent)
            self.folder.remove(JOURNAL)
            self.folder.sync()
        self.close()

    def close(self) -> None:
        """Release the lock; the partial folder stays for a later resume."""
        self._exit_stack.close()

    def discard(self) -> None:
        """Remove the partial folder."""
        # Something else at the path is not this run's to remove.
        if self.folder.is_at(self.path):
            # It does not follow links.
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def _open_folder(self, needed_bytes: int, spare_bytes: int) -> OwnFolder:
        """Open the partial folder of an interrupted run, or create one if there is space."""
        with destination_errors(self.path):
            if is_there(self.path):
                return OwnFolder(self.path)
            require_space(self.path, needed_bytes, spare_bytes)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        return OwnFolder(self.path, is_new=True)

    def _sweep(self) -> None:
        """Remove the temporary folders of all earlier processes."""
        for name in self.folder.names():
            if name.startswith(SCRATCH):
                self.folder.remove(name)

    def _require_only(self, files: Collection[str]) -> None:
        """Check that the partial folder, still at its path, has these plain files and the journal
        only.
        """
        names = self.folder.names()
        for name in names:
            # Raises an error for anything but a plain file of this user.
            self.folder.size(name)
        strange_names = sorted({*names} - {*files, JOURNAL})
        if strange_names:
            raise DestinationError(
                "is not part of the completed output",
                path=self.path / strange_names[0],
                hint=Message("move it away and repeat it with ", Option("resume", value=True)),
            )
        missing_names = sorted({*files} - {*names})
        if missing_names:
            missing_path = self.path / missing_names[0]
            raise DestinationError("was removed after it was written", path=missing_path)
        self.require_in_place()

    def _begin_or_check_journal(self, fingerprint: dict[str, Any]) -> list[dict[str, Any]]:
        """Compare the journal's fingerprint with this one, which begins a new journal, and select
        the entries after it.
        """
        if not self._journal.entries:
            self.record({"fingerprint": fingerprint})
            return []
        first, *later_entries = self._journal.entries
        before = first.get("fingerprint")
        if not isinstance(before, dict):
            raise build_not_ours_error(self.path / JOURNAL)
        if before != fingerprint:
            problem = "the interrupted run had different inputs or options"
            changed_keys = find_changed_keys(before, fingerprint)
            hint = "repeat its command, or remove the folder and start again"
            raise ResumeError(
                problem, path=self.path, found=f"changed {', '.join(changed_keys)}", hint=hint
            )
        return later_entries


def find_changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Find the keys in which two fingerprints differ; those that only one has, only if there is
    no other difference.
    """
    changed_keys: list[str] = []
    for key in sorted({*before} & {*now}):
        old_value = before[key]
        new_value = now[key]
        if old_value == new_value:
            continue
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            inner_keys = find_changed_keys(old_value, new_value)
            changed_keys.append(f"{key} ({', '.join(inner_keys)})")
        else:
            changed_keys.append(key)
    return changed_keys or sorted({*before} ^ {*now})


def require_name(dst: Path) -> None:
    """Check that a destination can be the name of a new output.

    Raises:
        RequestError: if a destination cannot be the name of a new output: it is empty, ``..``, a
            name on a hub, or the name of an unfinished output or of a part of a model, or ends in
            ``.GGUF``.
    """
    if dst.name in ("", "..") or "\0" in dst.name:
        problem = "the destination is not a name for a new folder"
        hint = "choose a folder that does not exist"
        raise RequestError(problem, found=repr(str(dst)), hint=hint)
    if str(dst).startswith(HUB_PREFIX):
        raise RequestError(
            "the destination is the name of a hub repository",
            found=dst,
            expected="a folder to create",
        )
    if dst.name.endswith(PARTIAL):
        problem = f"names that end in {PARTIAL} are for unfinished outputs"
        raise RequestError(problem, found=dst, hint="choose another destination")
    # Another spelling would make a folder of a model that is meant to be a file.
    if dst.suffix != GGUF_SUFFIX and dst.suffix.lower() == GGUF_SUFFIX:
        raise RequestError(
            "the extension of a GGUF file must be in lower case",
            found=dst.name,
            hint=f"write {dst.stem}{GGUF_SUFFIX}",
        )
    stem = parse_part_stem(dst.name)
    if stem is not None:
        problem = "the destination has the name of a part of a model"
        hint = f"write the whole model: {stem}{GGUF_SUFFIX}"
        raise RequestError(problem, found=dst.name, hint=hint)


def require_new_names(source: Path, dst: Path) -> None:
    """Raise a `RequestError` if a destination, or its partial folder, is the source."""
    # Links are followed, as one of the names may be a link to the other.
    new_paths = (os.path.realpath(dst), os.path.realpath(name_partial_folder(dst)))
    if os.path.realpath(source) in new_paths:
        raise RequestError("source and destination are the same folder", found=dst)


def require_output_absent(dst: Path, files: Sequence[str] | None, partial: Path) -> None:
    """Raise a `DestinationError` if an output exists, or one of its files; those of an interrupted
    run, which has a partial folder, are taken back instead.
    """
    require_absent(dst)
    if files is not None and not partial.is_dir():
        placed_files.PlacedFiles(dst.parent, files).require_absent()


def require_room_to_build(partial: Path, *, resume: bool) -> None:
    """Require that a partial folder does not exist, or is that of an interrupted run to resume.

    Raises:
        InterruptedRunError, BeingWrittenError: if it exists and is not to be resumed, or a job is
            writing there.
        ResumeError: if it is something else.
        DestinationError: if it cannot be read.
    """
    with destination_errors(partial):
        if not is_there(partial):
            return
    with contextlib.closing(OwnFolder(partial)) as folder:
        names = [name for name in folder.names() if not name.startswith(SCRATCH)]
        # A run that was killed before it made its journal leaves an empty folder.
        if names:
            if JOURNAL not in names:
                raise build_occupied_error(partial)
            problem = journal.describe_writer(folder)
            if problem:
                raise journal.build_in_use_error(problem)
    if not resume:
        hint = Message("add ", Option("resume", value=True), " to continue it, or remove it")
        raise InterruptedRunError("contains an interrupted run", path=partial, hint=hint)


def read_interrupted_fingerprint(dst: Path) -> dict[str, Any]:
    """Read the inputs and options of the interrupted run of an output; empty if there is none."""
    return journal.read_fingerprint(name_partial_folder(dst))


def require_finished(model: Path, manifest: str) -> None:
    """Raise a `CheckpointError` if a folder, or the folder of a file, is an unfinished output,
    which has no manifest yet, or a folder in one.
    """
    if model.is_file():
        folder = model.parent
    else:
        folder = model
    # An output can have folders with models of their own.
    if folder.parent.name.endswith(PARTIAL) and os.path.isfile(folder.parent / JOURNAL):
        folder = folder.parent
    # A run that is killed between the rename and its last line leaves the journal in the output.
    is_finished = not folder.name.endswith(PARTIAL) and os.path.isfile(folder / manifest)
    if is_finished or not os.path.isfile(folder / JOURNAL):
        return
    writer = None
    # It may be another user's folder.
    ignored_errors = contextlib.suppress(DestinationError, ResumeError)
    with ignored_errors, contextlib.closing(OwnFolder(folder)) as unfinished_folder:
        writer = journal.describe_writer(unfinished_folder)
    if writer:
        raise CheckpointError(writer, hint="it is not a complete model yet; wait until it is done")
    job = journal.read_fingerprint(folder).get("job")
    job_words = f" of {job}" if job in _JOBS else ""
    problem = f"is the partial output of an unfinished run{job_words}, not a model"
    hint = Message("add ", Option("resume", value=True, job=""), " to the command that began it")
    if job == "quantize":
        hint += Message(
            ", and ",
            Option("accept_quality_loss", value=True, job=""),
            " if it ended with a failed check of quality",
        )
    raise CheckpointError(problem, path=folder, hint=hint)


def note_partial_output(error: BaseException, partial: Path) -> None:
    """Add a note to an error or an interruption that the partial output is kept, or that there
    is none.
    """
    error.add_note(Message(f"{partial} ", _KEPT) if partial.exists() else _NOTHING)


def find_kept_note(error: BaseException | None) -> str | None:
    """Find the note of `note_partial_output` on an error or its cause, unless a partial output that
    it names no longer exists.
    """
    while error is not None:
        notes: Sequence[str] = getattr(error, "__notes__", ())
        for note in notes:
            if note == _NOTHING:
                return note
            # A later step may have removed the partial output.
            if note.endswith(_KEPT) and Path(note.removesuffix(f" {_KEPT}")).exists():
                return note
        # Errors are raised anew in another type on their way to the user.
        error = error.__cause__ or error.__context__
    return None


def name_partial_folder(dst: Path) -> Path:
    """Name the folder in which an output is built; a `RequestError` as from `require_name`."""
    require_name(dst)
    return dst.with_name(dst.name + PARTIAL)
