"""Find models in the cache of the hub's library, and record the files that were checked.

The library compares no hash with a file's content. This module hashes a file once: after its
download, or if it is in the cache without a record. The record, a file next to the snapshots, has
sizes and hashes; later only sizes are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.files.hub_answers import COMMIT, HubFile, is_file_name
from quantkit.files.source import SourceFile


@dataclass(frozen=True)
class CachedModel:
    """The folder of a model, ``owner/name``, in the cache; `file` is the only requested file,
    None for all of them.
    """

    name: str
    file: str | None

    @property
    def folder(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE, f"models--{self.name.replace('/', '--')}")

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def _record_path(self, commit: str) -> Path:
        if self.file is None:
            suffix = ""
        else:
            # A hash, as the name of a file may contain slashes.
            suffix = f"-{hashlib.sha256(self.file.encode()).hexdigest()[:16]}"
        return self.folder / "quantkit" / f"{commit}{suffix}.json"

    def record(self, commit: str, files: Iterable[HubFile]) -> None:
        """Record the files that are complete and checked."""
        path = self._record_path(commit)
        content: dict[str, dict[str, int | str]] = {}
        for file in files:
            content[file.name] = {"size": file.size, "digest": file.digest}
        # A shared cache may be read-only for this user. Without a record, files are checked again.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            # Under a new name, so that no link is followed.
            partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
            partial.write_text(json.dumps(content))
            os.replace(partial, path)

    def read_record(self, commit: str) -> set[HubFile]:
        """Read the recorded files; none if there is no record, or a damaged one."""
        try:
            content = json.loads(self._record_path(commit).read_bytes())
            files: set[HubFile] = set()
            for name, entry in content.items():
                files.add(HubFile(name, int(entry["size"]), str(entry["digest"])))
            return files
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return set()

    def find_snapshot(self, revision: str | None) -> Path | None:
        """Find the snapshot of a revision that was read last; None if it is not in the cache."""
        from huggingface_hub import snapshot_download

        try:
            # With patterns that match nothing, the library finds the folder and no more.
            folder = snapshot_download(
                self.name, revision=revision, local_files_only=True, allow_patterns=[]
            )
        except Exception:
            return None
        # The library reads the commit of a branch from a file that any program may have written,
        # unchecked, from a hub's answer.
        commit = Path(folder).name
        if not COMMIT.fullmatch(commit):
            return None
        return self.snapshot(commit)

    def list_files(self, commit: str) -> dict[str, int]:
        """List the sizes of the files of a commit, by name: those that were recorded, or else all
        that the library listed; none if there is neither list.
        """
        from huggingface_hub import get_cached_repo_tree

        sizes: dict[str, int] = {}
        for recorded in self.read_record(commit):
            sizes[recorded.name] = recorded.size
        if sizes:
            return sizes
        # The list is missing if the library was not used to download all files.
        try:
            listing = get_cached_repo_tree(self.name, revision=commit)
        except Exception:
            return {}
        for listed in listing:
            if is_file_name(listed.path):
                sizes[listed.path] = listed.size
        return sizes

    def forget_listing(self, commit: str) -> None:
        """Remove the library's list of the files of a commit, from which it reads ETags: other
        programs write it, unchecked.
        """
        (self.folder / "trees" / f"{commit}.json").unlink(missing_ok=True)

    def require_announced(self, commit: str, file: HubFile, checked: bool) -> None:
        """Compare a file with what the hub announced; only its size if its content was `checked`
        before.

        Raises:
            CheckpointError: if the file is missing or differs. If its name in the cache is this
                hash, it is removed, so that the next run downloads it again.
        """
        path = self.snapshot(commit) / file.name
        source = SourceFile(path)
        if checked and source.size == file.size:
            return
        # Two hexadecimal digits per byte: a longer hash than git's is the sha256 of a file in LFS.
        in_lfs = len(file.digest) == hashlib.sha256().digest_size * 2
        if in_lfs:
            digest = source.sha256()
        else:
            digest = source.git_blob_id()
        if (source.size, digest) == (file.size, file.digest):
            return
        difference = digest
        expected = file.digest
        if source.size != file.size:
            difference = f"{source.size} bytes"
            expected = f"{file.size} bytes"
        if digest == file.digest:
            # The content is right, so the hub announced a wrong size.
            hint = "try again"
        else:
            hint = self._remove(path, file)
        raise CheckpointError(
            "is not what the hub announced",
            path=path,
            found=difference,
            expected=expected,
            hint=hint,
        )

    def _remove(self, path: Path, file: HubFile) -> str:
        """Remove a blob whose name is not its hash, and return the hint for the user."""
        blob = self.folder / "blobs" / file.digest
        real = path.resolve()
        with contextlib.suppress(OSError):
            # A file of the snapshot may lead elsewhere: to another blob, or out of the cache.
            if blob.samefile(path):
                blob.unlink()
        if real.exists():
            return f"delete {real}, and try again"
        return "it was removed from the cache; try again"
