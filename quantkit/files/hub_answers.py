"""Check a hub's answers before they become paths or files are opened.

`huggingface_hub` 0.24 to 1.x joins the commit and the ETag of an answer to paths in its cache
without a check, and downloads without a limit. It makes these requests itself, and an earlier
request by quantkit could get another answer, so its functions are wrapped while
`validate_hub_answers` runs.
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

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# It becomes a file name in the cache, so it may not begin with a dot.
_ETAG = re.compile(r"[\w+=~-][\w.+=~-]{0,199}", re.ASCII)
# Backslashes separate folders on Windows; control characters could drive a terminal.
_NO_FILE = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_SIZE = 1 << 60
_HINT = "try again, or set HF_ENDPOINT to another hub"


@dataclass(frozen=True)
class HubFile:
    """A file as the hub announces it.

    Attributes:
        name: its path in the repository.
        size: in bytes.
        digest: of its content, in hexadecimal: the sha256 of a file in LFS (64 digits), else git's
            blob id (40).
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class _Expected:
    """What the answers to a request must contain, None for any; `path` is for errors."""

    path: str | None = None
    commit: str | None = None
    file: HubFile | None = None


_ANY = _Expected()
# Several threads download at the same time, each another file.
_expected: ContextVar[_Expected] = ContextVar("_expected", default=_ANY)
_lock = Lock()
_users = 0
_replaced: dict[str, Any] = {}


def validate_commit(commit: object, path: str | None, expected: str | None = None) -> str:
    """Require a commit that is safe as part of a path, and return it.

    Args:
        path: for errors.
        expected: the only valid commit; None for any.

    Raises:
        CheckpointError: if it is not a commit, or not the expected one.
    """
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _make_answer_error("does not name a commit", path, commit, "40 hexadecimal digits")
    if expected is not None and commit != expected:
        raise _make_answer_error("names the wrong commit", path, commit, expected)
    return commit


def files_by_name(info: Any, path: str) -> dict[str, Any]:
    """Collect the library's entries for the files of a repository, by name.

    Raises:
        CheckpointError: if the answer does not list files, or a name that leads out of the folder.
    """
    if not isinstance(info.siblings, list):
        raise _make_answer_error("does not list files", path, info.siblings, "siblings")
    siblings: dict[str, Any] = {}
    for sibling in info.siblings:
        name = sibling.rfilename
        if not is_file_name(name):
            raise _make_answer_error(
                "lists a file with an invalid name", path, name, "a path inside a folder"
            )
        siblings[name] = sibling
    return siblings


def is_file_name(name: object) -> bool:
    """Return whether a value is the path of a file in a repository."""
    return isinstance(name, str) and not _NO_FILE.search(name) and _is_relative(name)


def parse_hub_file(sibling: Any, path: str) -> HubFile:
    """Read the size and the hash that the hub announces for a file.

    Raises:
        CheckpointError: if one of them is missing or invalid, or there are two sizes.
    """
    name = sibling.rfilename
    lfs = sibling.lfs
    if lfs is None:
        digest = sibling.blob_id
        # git names blobs as it names commits, by 40 digits.
        digest_pattern = COMMIT
        key = "blobId"
    else:
        digest = lfs.sha256
        digest_pattern = _SHA256
        key = "sha256"
    if type(sibling.size) is not int or not 0 <= sibling.size < _MAX_SIZE:
        raise _make_answer_error(
            f"does not state the size of {format_value(name)}",
            path,
            sibling.size,
            "a number of bytes",
        )
    if lfs is not None and (type(lfs.size) is not int or lfs.size != sibling.size):
        raise _make_answer_error(
            f"states two sizes of {format_value(name)}", path, lfs.size, sibling.size
        )
    if not isinstance(digest, str) or not digest_pattern.fullmatch(digest):
        raise _make_answer_error(
            f"does not state the hash of {format_value(name)}", path, digest, f"a {key}"
        )
    return HubFile(name, sibling.size, digest)


@contextmanager
def validate_hub_answers(
    path: str, commit: str | None = None, file: HubFile | None = None
) -> Iterator[None]:
    """Make the hub's library refuse answers whose commit or ETag leads out of its cache.

    In the context, the answers in all threads are checked, and raise a `CheckpointError` from
    within the library. Answers in this thread must also be for `commit` and `file`, unless these
    are None; `path` is for errors.
    """
    global _users
    from huggingface_hub import file_download

    token = _expected.set(_Expected(path, commit, file))
    # The functions belong to the module, so the last thread that leaves restores them.
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
    """Wrap functions of the hub's library, whose paths come from what `get_hf_file_metadata`
    returns or raises.
    """
    original = _replaced["get_hf_file_metadata"] = file_download.get_hf_file_metadata

    def get_validated_metadata(url: str, *arguments: Any, **options: Any) -> Any:
        expected = _expected.get()
        _, resolve, requested = unquote(urlsplit(url).path).partition("/resolve/")
        # The library may have made the address from the commit of an earlier answer.
        if resolve and not _is_relative(requested):
            raise _make_answer_error(
                "redirects to an address that is not a file's", expected.path, requested
            )
        try:
            metadata = original(url, *arguments, **options)
        except Exception as error:
            response = getattr(error, "response", None)
            if response is not None:
                commit = response.headers.get("X-Repo-Commit")
                # The library records missing files, in a folder that it names by this commit.
                if commit is not None:
                    validate_commit(commit, expected.path, expected.commit)
            raise
        # Without a commit the library downloads nothing.
        if metadata.commit_hash is not None or expected.commit is not None:
            validate_commit(metadata.commit_hash, expected.path, expected.commit)
        file = expected.file
        etag = metadata.etag
        if file is None and etag is not None and not _ETAG.fullmatch(etag):
            raise _make_answer_error(
                "has an ETag that is not the name of a file", expected.path, etag
            )
        if file is not None and etag != file.digest:
            raise _make_answer_error(
                f"has the wrong ETag for {format_value(file.name)}",
                expected.path,
                etag,
                file.digest,
            )
        if file is not None and metadata.size not in (None, file.size):
            raise _make_answer_error(
                f"has the wrong size for {format_value(file.name)}",
                expected.path,
                metadata.size,
                file.size,
            )
        # Older versions of the library do not know Xet storage.
        xet = getattr(metadata, "xet_file_data", None)
        if xet is not None:
            if not isinstance(xet.file_hash, str) or not _SHA256.fullmatch(xet.file_hash):
                raise _make_answer_error(
                    "does not state the hash of its storage",
                    expected.path,
                    xet.file_hash,
                    "64 hexadecimal digits",
                )
            # Storage must be requested through the hub itself, as the library sends the user's
            # token there.
            route = urlsplit(str(xet.refresh_route))
            hub_address = urlsplit(url)
            if (route.scheme, route.netloc) != (hub_address.scheme, hub_address.netloc):
                raise _make_answer_error(
                    "redirects to another host for its storage",
                    expected.path,
                    xet.refresh_route,
                    hub_address.netloc,
                )
        return metadata

    file_download.get_hf_file_metadata = get_validated_metadata
    download = _replaced["http_get"] = file_download.http_get

    def download_with_limit(url: str, temp_file: Any, *arguments: Any, **options: Any) -> Any:
        expected = _expected.get()
        if expected.file is not None:
            temp_file = _Limited(temp_file, expected.file, expected.path)
        return download(url, temp_file, *arguments, **options)

    file_download.http_get = download_with_limit
    # The library reads ETags from these files, which other programs write unchecked.
    if hasattr(file_download, "read_tree_cache"):
        _replaced["read_tree_cache"] = file_download.read_tree_cache
        file_download.read_tree_cache = lambda *_, **__: None


class _Limited:
    """A file that accepts no more bytes than the hub announced, since a response may be endless."""

    def __init__(self, inner: Any, file: HubFile, path: str | None) -> None:
        self._inner = inner
        self._file = file
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, chunk: bytes) -> Any:
        if self._inner.tell() + len(chunk) > self._file.size:
            problem = f"sends more of {format_value(self._file.name)} than it announced"
            limit = f"{self._file.size} bytes"
            raise _make_answer_error(problem, self._path, f"over {limit}", limit)
        return self._inner.write(chunk)


def _is_relative(name: str) -> bool:
    """Return whether each part of a path in a repository is a name, and none leads to a parent or
    to the root.
    """
    return all(part not in ("", ".", "..") for part in re.split(r"[/\\]", name))


def _make_answer_error(
    problem: str, path: str | None, found: object, expected: object = None
) -> CheckpointError:
    return CheckpointError(
        f"the hub's answer {problem}",
        path=path,
        found=format_value(found),
        expected=expected,
        hint=_HINT,
    )
