"""Name what a file really is when it is not the weights it should be."""

from __future__ import annotations

import os
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.formats.source import SourceFile

_LFS = b"version https://git-lfs.github.com/spec"
_HTML = (b"<!doctype html", b"<html", b"<?xml", b"<head")


def open_weights(path: Path) -> SourceFile:
    """Open a file that is not a stand-in for weights.

    Raises:
        CheckpointError: for a missing or empty file, one that is no regular file, a git-lfs
            pointer, an HTML or JSON error page.
    """
    if not os.path.exists(path):
        raise CheckpointError("the weight file is missing", path=path, hint="download it again")
    file = SourceFile(path)
    size = file.size
    head = file.read(0, min(size, 512))
    if not head:
        raise CheckpointError("the weight file is empty", path=path, found="0 bytes")
    if head.startswith(_LFS):
        raise CheckpointError(
            "is a git-lfs pointer, not weights", path=path, found=f"{size} bytes", hint="run 'git lfs pull'"
        )
    text = head.lstrip().lower()
    if text.startswith(_HTML):
        raise CheckpointError(
            "is an HTML page, not weights", path=path, found=f"{size} bytes",
            hint="the download failed; log in or accept the licence, and download again",
        )  # fmt: skip
    if text.startswith((b'{"error', b'{"message', b'{"detail', b"invalid username", b"access to model")):
        raise CheckpointError(
            "is an error message of a server, not weights", path=path, found=f"{size} bytes",
            hint="download it again",
        )  # fmt: skip
    return file
