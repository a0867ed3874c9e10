"""Describe files of a folder for an upload: their names in a repository, sizes and hashes."""

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
        """Compute the hash by which git names the content."""
        if isinstance(self.content, bytes):
            blob = b"blob %d\0%b" % (self.size, self.content)
            # Systems in FIPS mode refuse SHA-1 for security.
            return hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        return SourceFile(self.content).git_blob_id()

    def digest_like(self, announced: HubFile) -> str:
        """Compute the hash that the hub announces: the sha256 of a file in LFS, else git's blob
        id.
        """
        if len(announced.digest) == _SHA256_DIGITS:
            return self.sha256
        # Computed only if needed, as it reads the file once more.
        return self.blob_id

    def equals(self, announced: HubFile | None) -> bool:
        """Compare the size and the hash of the file with what the hub announces."""
        if announced is None or announced.size != self.size:
            return False
        return announced.digest == self.digest_like(announced)

    def require_unchanged(self) -> None:
        """Raise a `CheckpointError` if the file is no longer the one that was hashed."""
        if isinstance(self.content, bytes):
            return
        try:
            status = self.content.stat()
        except OSError as error:
            raise CheckpointError(
                f"changed while it was sent: {error.strerror}", path=self.content
            ) from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise CheckpointError(
                "changed while it was sent", path=self.content, hint="repeat the command"
            )


def in_memory(name: str, content: bytes) -> LocalFile:
    """Describe a file whose content is not on disk."""
    return LocalFile(name, content, len(content), hashlib.sha256(content).hexdigest())


def hash_files(files: Mapping[str, Path], progress: Progress) -> dict[str, LocalFile]:
    """Read files by their names in a repository, and hash them, one after the other.

    Raises:
        CheckpointError: if one is missing, irregular, or changes while it is read.
    """
    total = sum(path.stat().st_size for path in files.values())
    local_files: dict[str, LocalFile] = {}
    done = 0
    for name, path in files.items():
        report_bytes(progress, "sha256", done, total)
        source = SourceFile(path)
        # Read before the hash: a change in between is found by `require_unchanged`.
        modified = path.stat().st_mtime_ns
        digest = source.sha256()
        source.require_unchanged()
        local_files[name] = LocalFile(
            name=name, content=path, size=source.size, sha256=digest, modified=modified
        )
        done += source.size
    report_bytes(progress, "sha256", total, total)
    return local_files


def report_bytes(progress: Progress, phase: str, done: int, total: int) -> None:
    """Report a number of bytes in megabytes, rounded up."""
    progress(phase, -(-done // MEGABYTE), -(-total // MEGABYTE), "MB")
