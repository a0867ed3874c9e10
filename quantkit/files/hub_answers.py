"""Check a hub's answers before they become paths or files are opened.

`huggingface_hub` joins the commit and the ETag of an answer to paths in its cache without a check,
and sends the user's token wherever an answer says that a file is stored. It makes these requests
itself, and an earlier request by quantkit could get another answer, so its HTTP client checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import unquote

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# It becomes a file name in the cache, so it may not begin with a dot.
_ETAG = re.compile(r"[\w+=~-][\w.+=~-]{0,199}", re.ASCII)
# Backslashes separate folders on Windows; control characters could drive a terminal.
_NO_FILE = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_SIZE = 1 << 60
# How long a connection may carry nothing.
_SILENT_SECONDS = 600.0
# Bytes beyond its announced size after which a download is stopped.
_SPARE_BYTES = 1 << 24
_HOME = "https://huggingface.co/"


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
    _require(expected in (None, commit), "names the wrong commit", path, commit, expected)
    return commit


def files_by_name(info: Any, path: str) -> dict[str, Any]:
    """Collect the library's entries for the files of a repository, by name.

    Raises:
        CheckpointError: if the answer does not list files, or a name that leads out of the folder.
    """
    siblings = info.siblings
    _require(isinstance(siblings, list), "does not list files", path, siblings, "siblings")
    named: dict[str, Any] = {}
    for sibling in siblings:
        name = sibling.rfilename
        problem = "lists a file with an invalid name"
        _require(is_file_name(name), problem, path, name, "a path inside a folder")
        named[name] = sibling
    return named


def is_file_name(name: object) -> bool:
    """Return whether a value is the path of a file in a repository."""
    return isinstance(name, str) and not _NO_FILE.search(name) and _is_relative(name)


def parse_hub_file(sibling: Any, path: str) -> HubFile:
    """Read the size and the hash that the hub announces for a file.

    Raises:
        CheckpointError: if one of them is missing or invalid, or there are two sizes.
    """
    name = format_value(sibling.rfilename)
    size = sibling.size
    is_size = type(size) is int and 0 <= size < _MAX_SIZE
    _require(is_size, f"does not state the size of {name}", path, size, "a number of bytes")
    lfs = sibling.lfs
    if lfs is None:
        digest = sibling.blob_id
        # git names blobs as it names commits, by 40 digits.
        digest_pattern = COMMIT
        key = "a blobId"
    else:
        is_same_size = type(lfs.size) is int and lfs.size == size
        _require(is_same_size, f"states two sizes of {name}", path, lfs.size, size)
        digest = lfs.sha256
        digest_pattern = _SHA256
        key = "a sha256"
    is_digest = isinstance(digest, str) and digest_pattern.fullmatch(digest) is not None
    _require(is_digest, f"does not state the hash of {name}", path, digest, key)
    return HubFile(sibling.rfilename, size, digest)


@contextmanager
def validate_hub_answers(
    path: str, commit: str | None = None, file: HubFile | None = None
) -> Iterator[None]:
    """Make the library's HTTP client refuse answers that lead out of the library's cache.

    Afterwards the answers to all requests of the library are checked, in any thread, and raise a
    `CheckpointError`. In the context, those in this thread must also be about `commit` and `file`,
    unless these are None; `path` is for errors.
    """
    from huggingface_hub import get_session, set_client_factory

    # The library closes its client when the factory is set, so only the first thread sets it.
    with _lock:
        client: Any = get_session()
        # A hook of this client alone would get lost: the library makes a new one after some errors.
        if _check_answer not in client.event_hooks["response"]:
            set_client_factory(partial(_make_checked_client, client))
    token = _expected.set(_Expected(path, commit, file))
    try:
        yield
    finally:
        _expected.reset(token)


def limit_download(file: HubFile, path: str) -> Any:
    """Make the class of a progress bar that stops a download of more bytes than the hub announced
    for a file: a body may be endless, and the library compares its size only at its end.

    The bar raises a `CheckpointError`; `path` is for this error.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    library_bar: Any = utils.tqdm
    # Downloads from Xet storage may report more than the file's own bytes.
    max_bytes = file.size + _SPARE_BYTES

    class LimitedBar(library_bar):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            # A bar that is not shown counts nothing itself.
            self._received = 0.0

        # The library calls it before it writes the bytes.
        def update(self, count: float | None = 1) -> bool | None:
            self._received += count or 0
            problem = f"sends more of {format_value(file.name)} than it announced"
            _require(self._received <= max_bytes, problem, path, self._received, file.size)
            shown: bool | None = super().update(count)
            return shown

    return LimitedBar


def _make_checked_client(client: Any) -> Any:
    """Make an HTTP client with the settings of the library's, which checks every answer."""
    hooks = client.event_hooks
    return type(client)(
        event_hooks={**hooks, "response": [*hooks["response"], _check_answer]},
        follow_redirects=client.follow_redirects,
        # The library sets none for uploads, and would wait for a silent hub without end.
        timeout=_SILENT_SECONDS,
    )


def _check_answer(response: Any) -> None:
    """Check the headers of an answer before the library reads them."""
    expected = _expected.get()
    path = expected.path
    address = unquote(response.request.url.raw_path.decode("ascii").partition("?")[0])
    requested = address.partition("/resolve/")[2]
    # The library may have made the address from the commit of an earlier answer.
    is_address = "/resolve/" not in address or _is_relative(requested)
    _require(is_address, "redirects to an address that is not a file's", path, requested)
    headers = response.headers
    commit = headers.get("X-Repo-Commit")
    # Also of a missing file, which the library records in a folder of this name.
    if commit is not None:
        validate_commit(commit, path, expected.commit)
    _check_storage(response, path)
    # The library takes the name of a blob from the answer to this kind of request only.
    if response.request.method != "HEAD" or response.is_error:
        return
    # As the library reads it.
    etag = (headers.get("X-Linked-Etag") or headers.get("ETag", "")).lstrip("W/").strip('"')
    file = expected.file
    # A redirection within the hub describes no file.
    if file is not None and (not response.is_redirect or "X-Linked-Etag" in headers):
        validate_commit(commit, path, expected.commit)
        name = format_value(file.name)
        _require(etag == file.digest, f"has the wrong ETag for {name}", path, etag, file.digest)
        size = headers.get("X-Linked-Size")
        if size is None and not response.is_redirect:
            size = headers.get("Content-Length")
        is_size = size in (None, str(file.size))
        _require(is_size, f"has the wrong size for {name}", path, size, file.size)
    elif "ETag" in headers or "X-Linked-Etag" in headers:
        is_name = _ETAG.fullmatch(etag) is not None
        _require(is_name, "has an ETag that is not the name of a file", path, etag)


def _check_storage(response: Any, path: str | None) -> None:
    """Check where a file lies in Xet storage, if it does."""
    # Files in git or in LFS have none.
    file_hash = response.headers.get("X-Xet-Hash")
    if file_hash is None:
        return
    is_hash = _SHA256.fullmatch(file_hash) is not None
    _require(
        is_hash, "does not state the hash of its storage", path, file_hash, "64 hexadecimal digits"
    )
    link = response.links.get("xet-auth", {}).get("url")
    route = link or response.headers.get("X-Xet-Refresh-Route") or _HOME
    hub = response.request.url
    host = hub.netloc.decode("ascii")
    # The library sends the user's token there. It replaces the address of the public hub by that of
    # the hub in use.
    is_hub = route.startswith((_HOME, f"{hub.scheme}://{host}/"))
    _require(is_hub, "redirects to another host for its storage", path, route, host)


def _is_relative(name: str) -> bool:
    """Return whether each part of a path in a repository is a name, and none leads to a parent or
    to the root.
    """
    return all(part not in ("", ".", "..") for part in re.split(r"[/\\]", name))


def _require(
    valid: bool, problem: str, path: str | None, found: object, expected: object = None
) -> None:
    if not valid:
        raise _make_answer_error(problem, path, found, expected)


def _make_answer_error(
    problem: str, path: str | None, found: object, expected: object
) -> CheckpointError:
    return CheckpointError(
        f"the hub's answer {problem}",
        path=path,
        found=format_value(found),
        expected=expected,
        hint="try again, or set HF_ENDPOINT to another hub",
    )
