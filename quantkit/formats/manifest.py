"""``quantkit.json``: what was made, from what, and the sha256 of every file. For a model that is a
file, ``X.gguf``, it is ``X.gguf.quantkit.json``.

It has no time and no path, so equal inputs give an equal file.

Format version 2 differs from 1 in the names of two keys, in folders that ``quantize`` made:

==========  ===========  ====================================================
version 1   version 2    holds
==========  ===========  ====================================================
``plan``    ``recipe``   the default scheme and the requested overrides
``tensors`` ``modules``  the result for each linear layer, by module
==========  ===========  ====================================================
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import read_json
from quantkit.base.progress import Progress, silent
from quantkit.errors import CheckpointError
from quantkit.files.source import SourceFile
from quantkit.formats.output.destination import MANIFEST, manifest_path
from quantkit.version import __version__

NAME = MANIFEST
FORMAT_VERSION = 2
ACTIVATIONS = "activations"
"""The key with the types that runtimes round the inputs of linears to, by scheme of
these.
"""
_WAIT_SECONDS = 1.0


def build(
    job: str,
    source_format: str,
    source_hashes: Mapping[str, str],
    file_hashes: Mapping[str, str],
    details: Mapping[str, Any],
    hub: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the content of the manifest; `hub` is the source's name on a hub, and its commit, if it
    comes from one.
    """
    source: dict[str, Any] = {"format": source_format}
    if hub is not None:
        source["hub"] = dict(hub)
    source["sha256"] = dict(source_hashes)
    head = {
        "format_version": FORMAT_VERSION,
        "quantkit_version": __version__,
        "job": job,
        "source": source,
    }
    return {**head, **details, "files": dict(file_hashes)}


def read(model: Path) -> dict[str, Any]:
    """Read the manifest of a folder or a file.

    Raises:
        CheckpointError: if it is missing, not a manifest, or of another format version.
    """
    path = manifest_path(model)
    manifest = read_json(path)
    files = manifest.get("files")
    has_files = isinstance(files, dict) and all(
        isinstance(digest, str) for digest in files.values()
    )
    version = manifest.get("format_version")
    if not isinstance(version, int) or not has_files:
        raise CheckpointError("is not a quantkit manifest", path=path)
    if version != FORMAT_VERSION:
        if version > FORMAT_VERSION:
            problem = "was written by a newer quantkit"
        else:
            problem = "has a format version that no release wrote"
        raise CheckpointError(problem, path=path, found=version, expected=FORMAT_VERSION)
    return dict(manifest)


def models_in(folder: Path) -> list[Path]:
    """Find the folders in a folder that have a manifest, sorted: a model in several formats."""
    return sorted(path.parent for path in folder.glob(f"*/{NAME}"))


def identity(files: Iterable[SourceFile]) -> list[list[Any]]:
    """Collect the identity of files, see `SourceFile.identity`."""
    return [list(file.identity()) for file in files]


class SourceHashes:
    """The sha256 of source files, computed in the background while they are converted."""

    def __init__(self, files: Iterable[SourceFile], folder: Path) -> None:
        self._files = list(files)
        self._folder = folder
        self._hashes: dict[str, str] = {}
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="quantkit-hash", daemon=True)
        self._thread.start()

    def result(self, progress: Progress = silent) -> dict[str, str]:
        """Wait for the hashes, by names relative to the folder.

        Raises:
            CheckpointError: if a file could not be read, is damaged, or changed since it was
                opened.
        """
        # Progress is shown only if the hashes are not ready within a second.
        self._thread.join(_WAIT_SECONDS)
        while self._thread.is_alive():
            progress("sha256 of the source", len(self._hashes), len(self._files), "files")
            self._thread.join(_WAIT_SECONDS)
        self.require_sound()
        for file in self._files:
            file.require_unchanged()
        return self._hashes

    def require_sound(self) -> None:
        """Raise `CheckpointError` if a file so far could not be read or is damaged."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            for file in self._files:
                self._hashes[file.path.relative_to(self._folder).as_posix()] = file.sha256()
        except Exception as error:
            # Raised again in the thread that waits.
            self._failure = error
