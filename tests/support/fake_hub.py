"""A model hub on this machine: as much of its protocol as streaming a dataset and downloading a
model take.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Files = Mapping[str, bytes]
COMMIT = "1" * 40
"""Of all that is served."""
_LFS = (".pth", ".bin", ".safetensors", ".gguf", ".parquet", ".model")


@dataclass(frozen=True)
class Hostile:
    """What of a hub's answers about one repository is not as it should be.

    Attributes:
        info: changes the answer about the repository; called with it, returns another one.
        headers: changes the headers of the answer about a file; called with its path and them,
            returns others. The file may be one that is not there.
        body: changes the content that is sent of a file, not what is announced of it.
    """

    info: Callable[[Any], object] = lambda info: info
    headers: Callable[[str, dict[str, str]], Mapping[str, str]] = lambda path, headers: headers
    body: Callable[[str, bytes], bytes] = lambda path, body: body


@contextmanager
def hub(
    repositories: Mapping[str, Files],
    before: Callable[[str], object] = lambda path: None,
    hostile: Mapping[str, Hostile] = {},
) -> Iterator[tuple[str, list[str]]]:
    """Serve datasets and models, each the files by their paths.

    Args:
        before: called with a file's path before it is sent.
        hostile: by repository, what its answers are changed to.

    Returns:
        The hub's address, and a list that grows by the path of every file sent.
    """
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            request = re.fullmatch(
                rf"/(api/)?(?:datasets/|models/)?(\w+/\w+)(/\w+/(?:{COMMIT}|main))?/?(.*)",
                self.path.split("?")[0],
            )
            if request is None or request[2] not in repositories:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            api, name, verb, path = request.groups(default="")
            files, changed = repositories[name], hostile.get(name, Hostile())
            if verb.startswith("/tree"):
                found = _entries(files, f"{path}/" if path else "")
                return self._send(200, json.dumps(found).encode()) if found else self._missing()
            if api and path not in ("", "revision/main"):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if api:
                return self._send(200, json.dumps(changed.info(_info(name, files))).encode())
            headers = {"X-Repo-Commit": COMMIT}
            if path not in files:
                return self._missing(changed.headers(path, headers))
            if self.command == "GET":
                before(path)
                sent.append(path)
            headers |= {"ETag": f'"{_digest(path, files[path])}"', "Accept-Ranges": "bytes"}
            content = files[path]
            if self.command == "GET":
                content = changed.body(path, content)
            self._send(200, content, changed.headers(path, headers))

        def _missing(self, headers: Mapping[str, str] = {}) -> None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", **headers})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span and status == 200:
                first, last = int(span[1]), min(int(span[2]), len(body) - 1)
                status, headers = (
                    206,
                    {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"},
                )
                body = body[first : last + 1]
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                # A client may stop reading.
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()


def _digest(path: str, content: bytes) -> str:
    """What the hub calls a file by: the sha256 of one that lies in LFS, else git's name for it."""
    return hashlib.sha256(content).hexdigest() if path.endswith(_LFS) else git_name(content)


def git_name(content: bytes) -> str:
    """What git calls a file's content, its blob id."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def _info(name: str, files: Files) -> dict[str, Any]:
    """The hub's answer about a repository."""
    return {
        "id": name,
        "sha": COMMIT,
        "siblings": [_sibling(path, content) for path, content in files.items()],
    }


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    """What the hub announces of a file: one in LFS has its own hash, and git has a pointer to
    it.
    """
    found = {"rfilename": path, "size": len(content), "blobId": git_name(content)}
    if not path.endswith(_LFS):
        return found
    sha256 = _digest(path, content)
    version = "https://git-lfs.github.com/spec/v1"
    pointer = f"version {version}\noid sha256:{sha256}\nsize {len(content)}\n".encode()
    lfs = {"sha256": sha256, "size": len(content), "pointerSize": len(pointer)}
    return {**found, "blobId": git_name(pointer), "lfs": lfs}


def _entries(files: Files, prefix: str) -> list[dict[str, object]]:
    """What lies right in a folder."""
    below = {
        path.removeprefix(prefix): len(data)
        for path, data in files.items()
        if path.startswith(prefix)
    }
    folders = sorted({path.split("/")[0] for path in below if "/" in path})
    return [
        *({"type": "directory", "path": prefix + f, "size": 0, "oid": "0"} for f in folders),
        *(
            {"type": "file", "path": prefix + p, "size": n, "oid": "0"}
            for p, n in below.items()
            if "/" not in p
        ),
    ]
