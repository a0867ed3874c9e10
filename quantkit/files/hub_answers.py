"""Checks of what a hub answers, before a path is made of it or a file of it is opened.

The hub's library joins the commit and the ETag of an answer to the paths of its cache as they are. It makes these
requests itself, so its own function that returns them is checked while `checked_answers` lasts: another request before
it could get another answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from quantkit.errors import CheckpointError
from quantkit.json_values import shown

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB_ID = COMMIT
_COMMIT_EXPECTED = "40 hexadecimal digits"
_ETAG = re.compile(r"[\w+=~-][\w.+=~-]{0,199}", re.ASCII)
_NO_FILE = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_SIZE = 1 << 60
_HINT = "try again; HF_ENDPOINT chooses the hub"


@dataclass(frozen=True)
class HubFile:
    """A file as the hub announces it.

    Attributes:
        name: its path in the repository.
        size: in bytes.
        digest: of its content, in hexadecimal: the sha256 (64 digits), or git's blob id (40 digits) if the file is not
            in LFS.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class _Expected:
    """What the answers to a request must say.

    Attributes:
        path: what errors name; None if that is not known.
        commit, file: None where any will do.
    """

    path: str | None = None
    commit: str | None = None
    file: HubFile | None = None


_ANY = _Expected()
_expected: ContextVar[_Expected] = ContextVar("_expected", default=_ANY)
_lock = Lock()
_users = 0
_replaced: dict[str, Any] = {}


def checked_commit(commit: object, path: str | None, expected: str | None = None) -> str:
    """A commit of which a path may be made.

    Args:
        path: what errors name.
        expected: the only commit that will do; None for any.

    Raises:
        CheckpointError: if it is none, or another one.
    """
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _refused("names no commit", path, commit, _COMMIT_EXPECTED)
    if expected is not None and commit != expected:
        raise _refused("names the wrong commit", path, commit, expected)
    return commit


def siblings_by_name(info: Any, path: str) -> dict[str, Any]:
    """The files that the hub lists for a repository, as its library holds them, by name.

    Raises:
        CheckpointError: if the answer lists no files, or a name that does not stay inside a folder.
    """
    if not isinstance(info.siblings, list):
        raise _refused("lists no files", path, info.siblings, "siblings")
    for name in (one.rfilename for one in info.siblings):
        if not isinstance(name, str) or _NO_FILE.search(name) or not _is_relative(name):
            raise _refused("lists a file whose name is none", path, name, "a path inside a folder")
    return {one.rfilename: one for one in info.siblings}


def announced_file(sibling: Any, path: str) -> HubFile:
    """The size and the hash of a file that the hub announces.

    Raises:
        CheckpointError: if one of them is missing or none, or there are two sizes.
    """
    name, lfs = sibling.rfilename, sibling.lfs
    digest, kind = (sibling.blob_id, _BLOB_ID) if lfs is None else (lfs.sha256, _SHA256)
    if type(sibling.size) is not int or not 0 <= sibling.size < _MAX_SIZE:
        raise _refused(f"announces no size of {shown(name)}", path, sibling.size, "a number of bytes")
    if lfs is not None and (type(lfs.size) is not int or lfs.size != sibling.size):
        raise _refused(f"announces two sizes of {shown(name)}", path, lfs.size, sibling.size)
    if not isinstance(digest, str) or not kind.fullmatch(digest):
        raise _refused(f"announces no hash of {shown(name)}", path, digest, "a blobId" if lfs is None else "a sha256")
    return HubFile(name, sibling.size, digest)


@contextmanager
def checked_answers(path: str, commit: str | None = None, file: HubFile | None = None) -> Iterator[None]:
    """Have the hub's library refuse answers about files whose commit or ETag leads out of its cache.

    While it lasts, the answers in all threads are checked, and those in this thread also against `commit` and `file`.

    Args:
        path: what errors name.
        commit: the only commit that will do; None for any.
        file: the file that is requested; None for any.

    Raises:
        CheckpointError: from within the library, for such an answer.
    """
    global _users
    from huggingface_hub import file_download

    token = _expected.set(_Expected(path, commit, file))
    with _lock:
        if _users == 0:
            _install(file_download)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for name in list(_replaced):
                    setattr(file_download, name, _replaced.pop(name))
        _expected.reset(token)


def _install(file_download: Any) -> None:
    """Put the checks into a module of the hub's library. Its versions since 0.24 make their paths of what this function
    returns, or of the answer that it raises."""
    original = _replaced["get_hf_file_metadata"] = file_download.get_hf_file_metadata

    def checked(url: str, *arguments: Any, **options: Any) -> Any:
        expected = _expected.get()
        _, resolve, requested = unquote(urlsplit(url).path).partition("/resolve/")
        if resolve and not _is_relative(requested):  # its revision was a commit in an answer
            raise _refused("leads to an address that is none of a file", expected.path, requested)
        try:
            found = original(url, *arguments, **options)
        except Exception as error:
            response = getattr(error, "response", None)
            if response is not None and (commit := response.headers.get("X-Repo-Commit")) is not None:
                checked_commit(commit, expected.path, expected.commit)  # the library notes what a commit lacks
            raise
        if (found.commit_hash, expected.commit) != (None, None):  # without one the library downloads nothing
            checked_commit(found.commit_hash, expected.path, expected.commit)
        _require_matching(found, expected)
        _require_own_storage(getattr(found, "xet_file_data", None), url, expected.path)
        return found

    file_download.get_hf_file_metadata = checked
    download = _replaced["http_get"] = file_download.http_get

    def limited(url: str, temp_file: Any, *arguments: Any, **options: Any) -> Any:
        expected = _expected.get()
        if expected.file is not None:
            temp_file = _Limited(temp_file, expected.file, expected.path)
        return download(url, temp_file, *arguments, **options)

    file_download.http_get = limited
    if hasattr(file_download, "read_tree_cache"):  # other programs keep there what a hub answered: ETags, unchecked
        _replaced["read_tree_cache"] = file_download.read_tree_cache
        file_download.read_tree_cache = lambda *_, **__: None


class _Limited:
    """A file that takes no more bytes than the hub announced: a body may go on without end."""

    def __init__(self, inner: Any, file: HubFile, path: str | None) -> None:
        self._inner, self._file, self._path = inner, file, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, chunk: bytes) -> Any:
        """
        Raises:
            CheckpointError: if the file becomes larger than announced.
        """
        if self._inner.tell() + len(chunk) > self._file.size:
            name, size = shown(self._file.name), self._file.size
            raise _refused(f"sends more of {name} than it announced", self._path, f"over {size} bytes", f"{size} bytes")
        return self._inner.write(chunk)


def _require_own_storage(xet: Any, url: str, path: str | None) -> None:
    """Require that the storage that an answer names for a file is asked for through the hub itself: the library sends
    the user's token there.

    Raises:
        CheckpointError: if it is another host, or the file's hash there is none.
    """
    if xet is None:
        return
    if not isinstance(xet.file_hash, str) or not _SHA256.fullmatch(xet.file_hash):
        raise _refused("names no hash for its storage", path, xet.file_hash, "64 hexadecimal digits")
    route, own = urlsplit(str(xet.refresh_route)), urlsplit(url)
    if (route.scheme, route.netloc) != (own.scheme, own.netloc):
        raise _refused("leads to another host for its storage", path, xet.refresh_route, own.netloc)


def _require_matching(found: Any, expected: _Expected) -> None:
    """
    Raises:
        CheckpointError: if an ETag is no name, or is not the file's; or if the size is not.
    """
    file, etag = expected.file, found.etag
    if file is None:
        if etag is not None and not _ETAG.fullmatch(etag):
            raise _refused("has an ETag that is no name of a file", expected.path, etag)
        return
    if etag != file.digest:
        raise _refused(f"has the wrong ETag for {shown(file.name)}", expected.path, etag, file.digest)
    if found.size not in (None, file.size):
        raise _refused(f"has the wrong size for {shown(file.name)}", expected.path, found.size, file.size)


def _is_relative(name: str) -> bool:
    """Whether each part of a path in a repository is a name."""
    return all(part not in ("", ".", "..") for part in re.split(r"[/\\]", name))


def _refused(problem: str, path: str | None, found: object, expected: object = None) -> CheckpointError:
    return CheckpointError(f"the hub's answer {problem}", path=path, found=shown(found), expected=expected, hint=_HINT)
