"""With `if_exists="skip"`: whether an output that exists is what this job would write."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.late import LateModule
from quantkit.base.option_fields import IfExists
from quantkit.base.progress import Progress
from quantkit.errors import CheckpointError, DestinationError
from quantkit.files.hub_names import read_origin
from quantkit.formats import manifest
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint, with_codes
from quantkit.formats.output.destination import JOURNAL, destination_errors, is_there, manifest_path
from quantkit.formats.output.staging import (
    find_changed_keys,
    name_partial_folder,
    require_room_to_build,
)
from quantkit.jobs.output.writer import NOT_CHECKED, Work, content_hash, start_source_hashes
from quantkit.via_transformers.stacks import unstack_as

if TYPE_CHECKING:
    from quantkit.quality import manifest_files
else:
    manifest_files = LateModule("quantkit.quality.manifest_files")

_MEASURED = (
    "source_check",
    "quality",
    "positions",
    "modules",
    "schemes",
    "carried",
    "exact",
    "refined",
    "files",
)
"""Keys of the manifest that are not known before the job computes; all others are compared."""
_HINT = "choose another name or remove it"


def may_accept_existing(dst: Path, if_exists: IfExists) -> bool:
    """Return whether `if_exists` allows accepting what is at `dst`, and it is finished.

    Raises:
        DestinationError: if an unfinished one is next to it.
        ResumeError: if a job is writing there, or something else is in the way.
    """
    if if_exists != "skip":
        return False
    partial = name_partial_folder(dst)
    with destination_errors(dst):
        has_output = is_there(dst)
        has_manifest = is_there(manifest_path(dst))
        has_partial = is_there(partial)
    if has_output and has_partial:
        # A lock in the partial folder shows whether another job is writing there.
        require_room_to_build(partial, resume=True)
        problem = f"is unfinished, and {dst} exists already; nothing is overwritten"
        raise DestinationError(
            problem, path=partial, hint=f"remove {partial}, and repeat the command to compare {dst}"
        )
    # Several GGUF files have a manifest, and none is named as the destination.
    return (has_output or has_manifest) and not has_partial


def require_folders(dst: Path, folders: Collection[str]) -> None:
    """Raise a `DestinationError` if a finished output has other folders than these; ``""`` is
    the output itself.
    """
    if "" in folders:
        return
    with destination_errors(dst):
        existing_names = set[str]()
        if dst.is_dir():
            existing_names = {path.name for path in dst.iterdir()}
    # A run that was killed right after the rename leaves its journal.
    if existing_names - {JOURNAL} != {*folders}:
        raise _differs(dst, "to")


@dataclass(frozen=True)
class Existing:
    """An output that exists.

    All methods raise a `DestinationError` if it is another one than a job would write.
    """

    dst: Path
    manifest: dict[str, Any]

    @classmethod
    def read(cls, dst: Path, progress: Progress) -> Existing:
        """Open an output and require that its files, with the model card, have the hashes of its
        manifest.
        """
        with _convert_output_errors(dst):
            existing_manifest, edited = manifest_files.require_as_written(dst, progress=progress)
        result = cls(dst, existing_manifest)
        if edited:
            edited_files = [f"file {name}" for name in edited]
            raise result.differs(*edited_files)
        return result

    def require_inputs(
        self, work: Work, details: Mapping[str, object], *, source_check: bool, progress: Progress
    ) -> None:
        """Compare all of the manifest that is known before the job computes, to which it adds
        `details`.
        """
        source = work.source
        if work.computed_by:
            details = {**details, "computed_by": work.computed_by}
        hashes = start_source_hashes(source).result(progress)
        expected_manifest = manifest.build(
            work.job, source.format, hashes, {}, details, read_origin(source.path)
        )
        existing_values = _drop_measured(self.manifest)
        expected = _drop_measured(expected_manifest)
        # What the check measured is not known yet, only whether it was made.
        existing_values["source_check"] = self.manifest.get("source_check") != NOT_CHECKED
        expected["source_check"] = source_check
        self.require(existing_values, expected)

    def require_files(self, work: Work, card: Mapping[str, bytes] | None = None) -> None:
        """Compare the names of all files, the content of those next to the weights, and the
        weights' headers.
        """
        encoder = work.encoder
        files = self.manifest["files"]
        side_files = {**work.side_files, **encoder.extra_files(), **(card or {})}
        expected = {name: content_hash(content) for name, content in side_files.items()}
        # The hashes of weights are not known before they are computed; only the names count here.
        for name in encoder.files():
            expected[name] = files.get(name)
        # The content of a card depends on more than options and weights.
        reasons = dict.fromkeys(card or (), " (license, base model, or SRC's name or README)")
        self.require(_describe_files(files, reasons), _describe_files(expected, reasons))
        if self.dst.is_file() and self.dst.name not in files:
            # The manifest is that of several files.
            raise self.differs(f"file {self.dst.name}")
        # Headers have names, shapes and types of all tensors, and are made without the weights.
        for name, header in encoder.headers().items():
            path = manifest_path(self.dst).with_name(name)
            with destination_errors(path), path.open("rb") as file:
                if file.read(len(header)) != header:
                    raise self.differs(f"file {name}")

    def require(self, existing_values: dict[str, Any], expected: Mapping[str, object]) -> None:
        """Compare parts of the manifest with what the job would write there."""
        # As the manifest was read: JSON turns tuples into lists, and keys into strings.
        expected_values = json.loads(json.dumps(expected))
        if existing_values != expected_values:
            raise self.differs(*find_changed_keys(existing_values, expected_values))

    def read_passed_check(
        self, kind: Any, key: str, *, accepted: bool = False, **fields: object
    ) -> Any:
        """Read a check of the manifest, with these fields, and require that it was passed, or that
        its failure was and is `accepted`.
        """
        with _convert_output_errors(self.dst):
            check = kind.from_json(self.manifest.get(key), manifest_path(self.dst))
        # The fields, such as the text of a certificate, must be those that this job would write.
        expected = replace(check, **fields).to_json(accepted=accepted)
        self.require({key: self.manifest[key]}, {key: expected})
        if check.problem() is not None and not accepted:
            raise self.differs(f"{key} (passed)")
        return check

    def open_weights(self, work: Work) -> StoredCheckpoint:
        """Open its weights."""
        if self.dst.is_dir():
            path = self.dst
        else:
            path = self.dst.with_name(work.encoder.files()[0])
        with _convert_output_errors(self.dst):
            result = with_codes(open_checkpoint(path, tensors_only=not work.source.config.runnable))
            unstack_as(result, work.source.config)
            return result

    def differs(self, *names: str) -> DestinationError:
        """Build the error for what differs."""
        return _differs(self.dst, *names)


def _drop_measured(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a manifest without what is measured."""
    return {key: value for key, value in values.items() if key not in _MEASURED}


def _describe_files(hashes: Mapping[str, object], reasons: Mapping[str, str]) -> dict[str, object]:
    """Name each file for an error, with a reason why it may differ."""
    described: dict[str, object] = {}
    for name, digest in hashes.items():
        described[f"file {name}{reasons.get(name, '')}"] = digest
    return described


def _differs(dst: Path, *names: str) -> DestinationError:
    problem = "exists already, from other inputs or options; nothing is overwritten"
    return DestinationError(problem, path=dst, found=f"changed {', '.join(names)}", hint=_HINT)


@contextmanager
def _convert_output_errors(dst: Path) -> Iterator[None]:
    """Turn errors about an output into those about a destination."""
    try:
        yield
    except CheckpointError as error:
        raise DestinationError(
            f"exists already, and has changed since quantkit wrote it: {error.problem}",
            path=error.path or dst,
            found=error.found,
            expected=error.expected,
            hint=_HINT,
        ) from error
