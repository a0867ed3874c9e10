"""A model hub on this machine: as much of its protocol as streaming a dataset and downloading a model take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Files = Mapping[str, bytes]
COMMIT = "1" * 40
"""Of all that is served."""


@contextmanager
def hub(
    repositories: Mapping[str, Files], before: Callable[[str], object] = lambda path: None
) -> Iterator[tuple[str, list[str]]]:
    """Serve datasets and models, each the files by their paths.

    Args:
        before: called with a file's path before it is sent.

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
            asked = re.fullmatch(
                rf"/(api/)?(?:datasets/|models/)?(\w+/\w+)(/\w+/(?:{COMMIT}|main))?/?(.*)", self.path.split("?")[0]
            )
            if asked is None or asked[2] not in repositories:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            api, name, verb, path = asked.groups(default="")
            files = repositories[name]
            if verb.startswith("/tree"):
                found = _entries(files, f"{path}/" if path else "")
                return self._send(200, json.dumps(found).encode()) if found else self._missing()
            if api and path not in ("", "revision/main"):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if api:
                return self._send(200, json.dumps(_told(name, files)).encode())
            if path not in files:
                return self._missing()
            if self.command == "GET":
                before(path)
                sent.append(path)
            self._send(
                200, files[path], {"X-Repo-Commit": COMMIT, "ETag": _etag(files[path]), "Accept-Ranges": "bytes"}
            )

        def _missing(self) -> None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span and status == 200:
                first, last = int(span[1]), min(int(span[2]), len(body) - 1)
                status, headers = 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}
                body = body[first : last + 1]
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


def _told(name: str, files: Files) -> dict[str, object]:
    """What the hub says of a repository."""
    siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
    return {"id": name, "sha": COMMIT, "siblings": siblings}


def _entries(files: Files, prefix: str) -> list[dict[str, object]]:
    """What lies right in a folder."""
    below = {path.removeprefix(prefix): len(data) for path, data in files.items() if path.startswith(prefix)}
    folders = sorted({path.split("/")[0] for path in below if "/" in path})
    return [
        *({"type": "directory", "path": prefix + f, "size": 0, "oid": "0"} for f in folders),
        *({"type": "file", "path": prefix + p, "size": n, "oid": "0"} for p, n in below.items() if "/" not in p),
    ]
