"""Files of a folder as they are uploaded: their names in a repository, sizes and hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quantkit.base.progress import Progress
from quantkit.errors import CheckpointError
from quantkit.files.hub_answers import HubFile
from quantkit.files.source import SourceFile

MEGABYTE = 10**6
_SHA256_DIGITS = 64


@dataclass(frozen=True)
class LocalFile:
    """A file to upload.

    Attributes:
        name: its path in the repository.
        content: its path here, or its bytes.
        size: in bytes.
        sha256: in hexadecimal.
        modified: its modification time in nanoseconds when it was hashed; 0 for bytes.
    """

    name: str
    content: Path | bytes
    size: int
    sha256: str
    modified: int = 0

    @cached_property
    def blob_id(self) -> str:
        """Return the hash by which git names the content."""
        if isinstance(self.content, bytes):
            return hashlib.sha1(
                b"blob %d\0%b" % (self.size, self.content), usedforsecurity=False
            ).hexdigest()
        return SourceFile(self.content).git_blob_id()

    def equals(self, announced: HubFile | None) -> bool:
        """Return whether the hub announces this content: by sha256 for a file in LFS, else by git's
        blob id.
        """
        if announced is None or announced.size != self.size:
            return False
        return announced.digest == (
            self.sha256 if len(announced.digest) == _SHA256_DIGITS else self.blob_id
        )

    def require_unchanged(self) -> None:
        """Raise a `CheckpointError` if the file is no longer the one that was hashed."""
        if isinstance(self.content, bytes):
            return
        try:
            found = self.content.stat()
        except OSError as error:
            raise CheckpointError(
                f"changed while it was sent: {error.strerror}", path=self.content
            ) from error
        if (found.st_size, found.st_mtime_ns) != (self.size, self.modified):
            raise CheckpointError(
                "changed while it was sent", path=self.content, hint="repeat the command"
            )


def in_memory(name: str, content: bytes) -> LocalFile:
    """Return a file whose content is not on disk."""
    return LocalFile(name, content, len(content), hashlib.sha256(content).hexdigest())


def hash_files(files: Mapping[str, Path], progress: Progress) -> dict[str, LocalFile]:
    """Read files by their names in a repository, and hash them, one after the other.

    Raises:
        CheckpointError: if one is missing, irregular, or changes while it is read.
    """
    total = sum(path.stat().st_size for path in files.values())
    result = dict[str, LocalFile]()
    done = 0
    for name, path in files.items():
        report_bytes(progress, "sha256", done, total)
        source = SourceFile(path)
        modified = path.stat().st_mtime_ns
        digest = source.sha256()
        source.require_unchanged()
        result[name] = LocalFile(name, path, source.size, digest, modified)
        done += source.size
    report_bytes(progress, "sha256", total, total)
    return result


def report_bytes(progress: Progress, phase: str, done: int, total: int) -> None:
    """Report a number of bytes in megabytes, rounded up."""
    progress(phase, -(-done // MEGABYTE), -(-total // MEGABYTE), "MB")
