"""``quantkit.json``: what was made, from what, and the sha256 of every file.

It holds no time and no path, so equal inputs give an equal file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.json_values import read_json
from quantkit.version import __version__

NAME = "quantkit.json"
FORMAT_VERSION = 1
_PIECE = 1 << 22


def build(
    job: str,
    source_format: str,
    source_hashes: Mapping[str, str],
    file_hashes: Mapping[str, str],
    details: Mapping[str, Any],
) -> bytes:
    """The manifest's bytes."""
    value = {
        "format_version": FORMAT_VERSION,
        "quantkit_version": __version__,
        "job": job,
        "source": {"format": source_format, "sha256": dict(source_hashes)},
        **details,
        "files": dict(file_hashes),
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        CheckpointError: if it is missing, is no manifest, or of a newer format.
    """
    value = read_json(folder / NAME)
    if not isinstance(value.get("format_version"), int) or not isinstance(value.get("files"), dict):
        raise CheckpointError("is not a quantkit manifest", path=folder / NAME)
    if value["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            "was written by a newer quantkit",
            path=folder / NAME,
            found=value["format_version"],
            expected=FORMAT_VERSION,
        )
    return value


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def identity(paths: Iterable[Path]) -> list[list[Any]]:
    """Name, size and modification time of files: enough to tell that they changed."""
    stats = [(path.name, path.stat()) for path in paths]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


class SourceHashes:
    """The sha256 of source files, computed in the background while they are converted."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._before = identity(self._paths)
        self._hashes: dict[str, str] = {}
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="quantkit-hash", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, str]:
        """Wait for the hashes.

        Raises:
            CheckpointError: if a file could not be read or changed meanwhile.
        """
        self._thread.join()
        if self._failure is not None:
            raise CheckpointError(f"the source cannot be read: {self._failure}")
        for path, before, after in zip(self._paths, self._before, identity(self._paths), strict=True):
            if before != after:
                raise CheckpointError("the source changed while it was read", path=path)
        return self._hashes

    def _work(self) -> None:
        try:
            for path in self._paths:
                self._hashes[path.name] = file_sha256(path)
        except OSError as error:
            self._failure = error
