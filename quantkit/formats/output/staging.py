"""The folder an output is built in before it takes its final name.

``DST.partial`` lies beside ``DST``; a journal in it says what is safely on disk, so
that a killed run can go on. Only a complete output is renamed to ``DST``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import (
    CheckpointError,
    DestinationError,
    InterruptedRunError,
    NoSpaceError,
    QuantkitError,
    RequestError,
    ResumeError,
)
from quantkit.files.gguf_types import GGUF, split_stem
from quantkit.files.hub import PREFIX as HUB_PREFIX
from quantkit.formats.output.destination import (
    destination_errors,
    is_there,
    placed_as,
    require_absent,
    sync_folder,
)
from quantkit.formats.output.journal import NAME as JOURNAL
from quantkit.formats.output.journal import WRITER, Journal, being_written, first_entry, require_idle
from quantkit.formats.output.own_folder import OwnFolder, in_the_way, not_ours
from quantkit.formats.output.placed_files import ENTRY, PlacedFiles
from quantkit.memory import size_text

SCRATCH = ".activations"
"""How the names of folders begin that are of use only to the run that made them."""
_SUFFIX = ".partial"
_KEPT = "is kept: add `resume=True`"
_LONGEST_LINE = 1 << 20
_JOBS = ("convert", "quantize")
SPACE_MARGIN = 16 << 20
"""Bytes that an output leaves free at least."""


class Staging:
    """An output under construction, locked against a second writer.

    Attributes:
        dst: the final folder, or file.
        path, folder: the partial one.
        entries: what the journal of an interrupted run says after its fingerprint.
    """

    def __init__(
        self, dst: Path, fingerprint: Mapping[str, Any], needed_bytes: int, *, resume: bool,
        spare_bytes: int = SPACE_MARGIN, files: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Create the partial folder, or take up an interrupted one.

        Args:
            dst: the final folder, or file; it must not exist.
            fingerprint: inputs and options, JSON; a resumed run must have the same.
            needed_bytes: size of the whole output.
            resume: go on where an interrupted run stopped, if there is one.
            spare_bytes: that are to be free besides.
            files: that the output is, where it is no folder: they get their names beside `dst`, in this order.

        Raises:
            RequestError: if `dst` is no name for a folder.
            DestinationError: if `dst` or one of the files exists, cannot be written or has too little space.
            InterruptedRunError: if an interrupted run is there and `resume` is not set.
            BeingWrittenError: if a job is writing there.
            ResumeError: if the interrupted run had other inputs or options, or what is there is
                not what one leaves.
        """
        self.dst = dst
        self.path = partial_folder(dst)
        self._placed = None if files is None else PlacedFiles(dst.parent, files)
        require_output_absent(dst, files, self.path)
        require_room_to_build(self.path, resume=resume)
        with contextlib.ExitStack() as held:
            self.folder = self._made_or_taken_up(needed_bytes, spare_bytes)
            held.callback(self.folder.close)
            self._journal = Journal(self.folder)
            held.callback(self._journal.close)
            self._sweep()
            told = self._after(json.loads(json.dumps(fingerprint)))
            self.entries = [entry for entry in told if ENTRY not in entry]
            if self._placed is not None:
                self._placed.take_back(self.folder, told)
                self._placed.require_absent()
            written = sum(self.folder.size(name) for name in self.folder.names())
            require_space(self.path, needed_bytes - written, spare_bytes)
            self._held = held.pop_all()

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the journal and wait until it is on disk."""
        self._journal.append(entry)

    def require_in_place(self) -> None:
        """
        Raises:
            DestinationError: if the folder is no longer what its path leads to.
        """
        if not self.folder.is_at(self.path):
            raise DestinationError("was moved or replaced while it was written", path=self.path)

    def commit(self, files: Collection[str]) -> None:
        """Give the finished output its final name, or its files theirs.

        Args:
            files: what it is to hold.

        Raises:
            DestinationError: if that name has been taken meanwhile, or the folder holds anything else.
            ResumeError: if something in it is no plain file.
        """
        self._sweep()
        if WRITER in self.folder.names():
            self.folder.remove(WRITER)
        self._require_only(files)
        self.folder.sync()
        if self._placed is not None:
            try:
                self._placed.place(self.folder, self.record)
            finally:
                if self._placed.complete:
                    self.discard()
            return
        placed_as(self.path, self.dst)
        # The model is there and whole: nothing from here on may fail it. The journal goes last, since without it
        # a rename that is refused could not be tried again.
        with contextlib.suppress(OSError, DestinationError):
            sync_folder(self.dst.parent)
            self.folder.remove(JOURNAL)
            self.folder.sync()
        self.close()

    def close(self) -> None:
        """Release the lock; the partial folder stays for a later resume."""
        self._held.close()

    def discard(self) -> None:
        """Remove the partial folder: what failed would fail again."""
        if self.folder.is_at(self.path):
            shutil.rmtree(self.path, ignore_errors=True)  # it does not go through links
        self.close()

    def _made_or_taken_up(self, needed_bytes: int, spare_bytes: int) -> OwnFolder:
        with destination_errors(self.path):
            if is_there(self.path):
                return OwnFolder(self.path)
            require_space(self.path, needed_bytes, spare_bytes)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        return OwnFolder(self.path, made=True)

    def _sweep(self) -> None:
        """Remove what earlier runs, of however many processes, had for themselves."""
        for name in self.folder.names():
            if name.startswith(SCRATCH):
                self.folder.remove(name)

    def _require_only(self, files: Collection[str]) -> None:
        names = self.folder.names()
        for name in names:
            self.folder.size(name)
        if strange := sorted({*names} - {*files, JOURNAL}):
            raise DestinationError(
                "is no part of the output, which is complete", path=self.path / strange[0],
                hint="move it away and repeat it with `resume=True`",
            )  # fmt: skip
        if gone := sorted({*files} - {*names}):
            raise DestinationError("has gone since it was written", path=self.path / gone[0])
        self.require_in_place()

    def _after(self, fingerprint: dict[str, Any]) -> list[dict[str, Any]]:
        """What the journal says after the fingerprint, which must be this one."""
        if not self._journal.entries:
            self.record({"fingerprint": fingerprint})
            return []
        first, *rest = self._journal.entries
        before = first.get("fingerprint")
        if not isinstance(before, dict):
            raise not_ours(self.path / JOURNAL)
        if before != fingerprint:
            raise ResumeError(
                "the interrupted run had other inputs or options", path=self.path,
                found=f"changed {', '.join(_changes(before, fingerprint))}",
                hint="repeat its command, or remove the folder and start anew",
            )  # fmt: skip
        return rest


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two fingerprints differ in; of what only one has, as another method does, only where there is no other."""
    changed = []
    for key in sorted({*before} & {*now}):
        one, other = before[key], now[key]
        if isinstance(one, dict) and isinstance(other, dict):
            parts = sorted(part for part in {*one, *other} if one.get(part) != other.get(part))
            changed += [f"{key} ({', '.join(parts)})"] * bool(parts)
        elif one != other:
            changed.append(key)
    return changed or sorted({*before} ^ {*now})


def require_name(dst: Path) -> None:
    """Refuse a destination that cannot be the name of a new folder.

    Raises:
        RequestError: if it is empty, or leads to a folder that is always there, or is that of an unfinished output,
            or of a part of one, or of a file in capital letters.
    """
    if dst.name in ("", "..") or "\0" in dst.name:
        raise RequestError(
            "the destination is no name for a new folder", found=repr(str(dst)), hint="name a folder that is not there"
        )
    if str(dst).startswith(HUB_PREFIX):
        raise RequestError("the destination is a name on a hub", found=dst, expected="a folder to make")
    if dst.name.endswith(_SUFFIX):
        raise RequestError(
            f"names that end in {_SUFFIX} are for unfinished outputs", found=dst, hint="choose another destination"
        )
    if dst.suffix != GGUF == dst.suffix.lower():
        raise RequestError("names of GGUF files end in small letters", found=dst.name, hint=f"write {dst.stem}{GGUF}")
    if (stem := split_stem(dst.name)) is not None:
        raise RequestError(
            "the destination is the name of a part of a model", found=dst.name, hint=f"name the whole: {stem}{GGUF}"
        )


def require_new_names(source: Path, dst: Path) -> None:
    """Refuse a destination that is the source, or is built where that is.

    Raises:
        RequestError: if it is.
    """
    if os.path.realpath(source) in (os.path.realpath(dst), os.path.realpath(partial_folder(dst))):
        raise RequestError("source and destination are the same folder", found=dst)


def require_output_absent(dst: Path, files: Sequence[str] | None, partial: Path) -> None:
    """Refuse an output that is there, or one of its files; but not those that an interrupted run may take back.

    Args:
        files: that it is, where it is no folder.
        partial: where it is built.

    Raises:
        DestinationError: if it is there.
    """
    require_absent(dst)
    if files is not None and not partial.is_dir():
        PlacedFiles(dst.parent, files).require_absent()


def require_room_to_build(partial: Path, *, resume: bool) -> None:
    """Refuse a partial folder that is there, unless an interrupted run of this user left it and is to go on.

    Raises:
        InterruptedRunError, BeingWrittenError: if it is, or a job is writing there.
        ResumeError: if something else is there.
        DestinationError: if it cannot be looked into.
    """
    with destination_errors(partial):
        if not is_there(partial):
            return
    folder = OwnFolder(partial)
    try:
        names = [name for name in folder.names() if not name.startswith(SCRATCH)]
        if names and JOURNAL not in names:
            raise in_the_way(partial)
        if names:
            require_idle(folder)
    finally:
        folder.close()
    if not resume:
        raise InterruptedRunError(
            "an interrupted run is there", path=partial, hint="add `resume=True` to go on with it, or remove it"
        )


def interrupted_fingerprint(dst: Path) -> dict[str, Any]:
    """The inputs and options of an interrupted run for an output; empty if there is none."""
    found = first_entry(partial_folder(dst)).get("fingerprint")
    return found if isinstance(found, dict) else {}


def require_finished(model: Path, manifest: str) -> None:
    """Refuse a folder that is not a model yet, or a file in one: a run of quantkit writes there, or was interrupted.

    Args:
        manifest: the name of the file that is written last.

    Raises:
        CheckpointError: if it is one.
    """
    folder = model.parent if model.is_file() else model
    renamed = not folder.name.endswith(_SUFFIX) and os.path.isfile(folder / manifest)
    if renamed or not os.path.isfile(folder / JOURNAL):
        return
    told = None
    with contextlib.suppress(QuantkitError), contextlib.closing(OwnFolder(folder)) as held:  # it may be another user's
        told = being_written(held)
    if told:
        raise CheckpointError(told, hint="it is no model yet; wait until it is done")
    raise CheckpointError(
        f"is no model yet but what an interrupted run{_job(folder)} left", path=folder,
        hint="add `resume=True` to the command that began it",
    )  # fmt: skip


def _job(folder: Path) -> str:
    """What an unfinished output is of, as its journal says in its first line."""
    try:
        with (folder / JOURNAL).open("rb") as file:
            job = json.loads(file.readline(_LONGEST_LINE))["fingerprint"]["job"]
    except (LookupError, OSError, RecursionError, TypeError, ValueError):
        return ""
    return f" of {job}" if job in _JOBS else ""


def mark_kept(error: BaseException, partial: Path) -> None:
    """Note on an error or an interruption that what was written until then is kept."""
    error.add_note(f"{partial} {_KEPT}")


def kept(error: BaseException | None) -> str | None:
    """What was noted with `mark_kept`, on an error or on one that it came of, if it is still there."""
    while error is not None:
        for note in getattr(error, "__notes__", ()):
            if note.endswith(_KEPT) and Path(note.removesuffix(f" {_KEPT}")).exists():
                return str(note)
        error = error.__cause__ or error.__context__
    return None


def require_space(folder: Path, needed_bytes: int, spare_bytes: int = SPACE_MARGIN) -> None:
    """Refuse a disk that is too full; `folder` need not be there yet.

    Raises:
        NoSpaceError: if less is free than needed, and to spare.
    """
    with destination_errors(folder):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        disk = shutil.disk_usage(there)
    if disk.total == 0:  # of file systems that are none, such as /proc
        raise DestinationError("cannot be written: it is on no disk", path=folder.parent)
    free = disk.free
    if free < needed_bytes + spare_bytes:
        raise NoSpaceError(
            "too little space on the disk", path=folder.parent, found=f"{size_text(free)} free",
            expected=size_text(needed_bytes + spare_bytes),
        )  # fmt: skip


def partial_folder(dst: Path) -> Path:
    """Where an output is built.

    Raises:
        RequestError: see `require_name`.
    """
    require_name(dst)
    return dst.with_name(dst.name + _SUFFIX)
