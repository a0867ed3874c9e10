"""Refuse links that lead out of a model's folder.

Side files are copied or uploaded as they are. In a folder from somebody else, a link such as
``LICENSE -> ~/.ssh/id`` would publish a file of the user, so a link may only lead to where
downloads put files. Links to weights are followed wherever they lead: people keep large files on
other disks, and jobs parse weights and write tensors, so that any other file in their place is an
error.
"""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.errors import CheckpointError

_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
# Named by git's hash, or by the sha256 of a file in LFS.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def find_outside_target(path: Path, folder: Path) -> Path | None:
    """Resolve a path, and return its target if it is outside a folder and not in the hub library's
    cache; else None.

    The cache has three layouts, of which any may be the source: files of a snapshot link to
    ``blobs`` of the same repository; with shared blobs (huggingface_hub 2) these link to ``blobs``
    of the whole cache; before 0.23, ``local_dir`` was filled with links to a repository's
    ``blobs``. Blobs are named by their hash, so a link to one cannot be aimed at another file.
    """
    # A link that leads to itself has no target; `resolve` then raises or returns the link, by the
    # version of Python.
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return None
    if target.is_relative_to(folder.resolve()):
        return None
    parent = target.parent
    # models--OWNER--NAME/blobs/HASH
    if (
        parent.name == "blobs"
        and _REPOSITORY.fullmatch(parent.parent.name)
        and _BLOB.fullmatch(target.name)
    ):
        return None
    # blobs/PREFIX/HASH, where the folder's name is the beginning of the hash.
    is_shared = parent.parent.name == "blobs" and target.name.startswith(parent.name)
    if is_shared and _SHARED_BLOB.fullmatch(target.name):
        return None
    return target


def require_inside(path: Path, folder: Path) -> None:
    """Raise `CheckpointError` if a path leads out of a folder; see `find_outside_target`."""
    target = find_outside_target(path, folder)
    if target is not None:
        raise CheckpointError(
            "is a link to a file outside the folder",
            path=path,
            found=target,
            expected="a file of the folder, or of the Hugging Face cache",
            hint="if the file belongs to the model, replace the link with a copy",
        )
