"""Name what a file really is when it is not the weights it should be."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import CheckpointError

_LFS = b"version https://git-lfs.github.com/spec"
_HTML = (b"<!doctype html", b"<html", b"<?xml", b"<head")


def require_weights(path: Path) -> None:
    """Check that a file exists and is not a stand-in for weights.

    Raises:
        CheckpointError: for a missing or empty file, a git-lfs pointer, an HTML or
            JSON error page.
    """
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise CheckpointError("the weight file is missing", path=path, hint="download it again") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    size = path.stat().st_size
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
