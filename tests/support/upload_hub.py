"""A model hub on this machine that takes uploads: as much of the protocol as huggingface_hub uses
without Xet storage.

It stores the bytes that it receives, so that tests can compare them, and refuses those that are not
what was announced.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote

import yaml
from fake_hub import git_name

WRITE, READ = "hf_write", "hf_read"
"""Access tokens of the user ``me``."""
PART = 1 << 20
"""Larger files are sent in parts of this size."""
_PIECE = 1 << 16
_LFS = (".safetensors", ".gguf", ".model", ".bin", ".pth")
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)


@dataclass
class Repo:
    """A repository: the files of each commit, and the head of each branch."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Mapping[str, bytes], message: str) -> str:
        """Add a commit to a branch."""
        self.messages.append(message)
        sha = hashlib.sha1(f"{len(self.messages)}{branch}".encode()).hexdigest()
        self.commits[sha], self.heads[branch] = dict(files), sha
        return sha

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """The files at the head of a branch."""
        return self.commits[self.heads[branch]]


@dataclass
class Hub:
    """What the hub holds, and what it was sent.

    Attributes:
        lfs: content by sha256.
        puts: paths to which content was sent, one for each request that was complete.
        requests: all requests, such as ``POST /api/repos/create``.
        received: called with a path and the number of bytes of content received so far, in all.
        answer: called with a request; returns a status, a body and headers to send in place of the
            answer, or None.
        committed: changes the files of a commit before they are stored.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    total: int = 0
    received: Callable[[str, int], object] = lambda path, total: None
    answer: Callable[[str], tuple[int, bytes, dict[str, str]] | None] = lambda request: None
    committed: Callable[[dict[str, bytes]], dict[str, bytes]] = lambda files: files
    lock: Any = field(default_factory=Lock)

    def create(self, name: str, files: Mapping[str, bytes] = {}, *, private: bool = True) -> Repo:
        """Make a repository with an initial commit."""
        repo = self.repos[name] = Repo(private)
        repo.commit("main", {".gitattributes": b"*.gguf filter=lfs\n", **files}, "initial commit")
        for path, content in files.items():
            if path.endswith(_LFS):
                self.lfs[hashlib.sha256(content).hexdigest()] = content
        return repo


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


@contextmanager
def upload_hub() -> Iterator[tuple[str, Hub]]:
    """Serve an empty hub; its address, and what it holds."""
    hub = Hub()

    class Handler(_Handler):
        store = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    Handler.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield Handler.address, hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1  # an answer in one packet
    store: Hub
    address = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        try:
            body = self._body(path)
        except ConnectionError:
            return
        request = f"{self.command} {unquote(path)}"
        self.store.requests.append(request)
        other = self.store.answer(request)
        try:
            if other is not None:
                self._send(*other)
                return
            with self.store.lock:
                answer, headers = self._route(unquote(path), body)
            self._send(200, json.dumps(answer).encode(), headers)
        except _Refused as refused:
            headers = {"X-Error-Message": refused.message} | (
                {"X-Error-Code": refused.code} if refused.code else {}
            )
            self._send(refused.status, json.dumps({"error": refused.message}).encode(), headers)
        except ConnectionError:
            pass

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            **headers,
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _body(self, path: str) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline(), 16):
                data += self._read(path, size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self._read(path, int(self.headers.get("Content-Length") or 0))

    def _read(self, path: str, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.rfile.read(min(_PIECE, size - len(data)))
            if not piece:
                raise ConnectionError("the client is gone")
            data += piece
            if self.command == "PUT":
                self.store.total += len(piece)
                self.store.received(path, self.store.total)
        return bytes(data)

    def _route(self, path: str, body: bytes) -> tuple[Any, dict[str, str]]:
        if path.startswith("/lfs/"):
            return self._content(path, body)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITE, READ, ""):
            raise _Refused(401, "Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            return self._validated(json.loads(body)["content"]), {}
        if path == "/api/repos/create":
            return self._created(json.loads(body), token), {}
        found = re.fullmatch(
            r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(\.git)?(?:/([a-z]+)/?(.*))?", path
        )
        repo = self.store.repos.get(found[1]) if found else None
        if found is None or repo is None or (repo.private and not token):
            raise _Refused(404, "Repository not found", "RepoNotFound")
        name, verb, rest = found[1], found[3], found[4]
        if self.command == "GET":
            return self._described(name, repo, rest or "main"), {}
        if token != WRITE:
            raise _Refused(403, "You don't have write access")
        if verb == "branch":
            repo.commit(rest, repo.files(), f"branch {rest}")
            return {}, {}
        if verb == "info":
            return self._batch(json.loads(body)), {}
        if verb == "preupload":
            request = json.loads(body)
            ignored = repo.files(rest).get(".gitignore", b"").decode()
            ignored = request.get("gitIgnore", ignored)
            return {"files": [_mode(one["path"], ignored) for one in request["files"]]}, {}
        assert verb == "commit"
        return self._committed(name, repo, rest, body), {}

    def _created(self, request: dict[str, Any], token: str) -> Any:
        name = f"{request['organization']}/{request['name']}"
        if token != WRITE or request["organization"] != "me":
            raise _Refused(403, f"You may not create a model under {request['organization']}")
        if name in self.store.repos:
            raise _Refused(409, "You already created this model repo")
        private = request.get("private", request.get("visibility") == "private")
        self.store.create(name, private=private)
        return {"url": f"{self.address}/{name}"}

    def _described(self, name: str, repo: Repo, revision: str) -> Any:
        sha = repo.heads.get(revision, revision)
        if sha not in repo.commits:
            raise _Refused(404, "Invalid rev id", "RevisionNotFound")
        siblings = [_sibling(path, content) for path, content in repo.commits[sha].items()]
        return {"id": name, "sha": sha, "private": repo.private, "siblings": siblings}

    def _validated(self, content: str) -> Any:
        header = _HEADER.match(content)
        metadata = yaml.safe_load(header[1]) if header else {}
        if metadata.get("license") == "nonsense":
            raise _Refused(400, '"license" must be one of [apache-2.0, mit, other, ...]')
        return {
            "errors": [],
            "warnings": [] if metadata else [{"message": "empty or missing yaml metadata"}],
        }

    def _batch(self, request: dict[str, Any]) -> Any:
        found = []
        for one in request["objects"]:
            oid, size, address = one["oid"], one["size"], f"{self.address}/lfs/{one['oid']}"
            if oid in self.store.lfs:
                found.append({"oid": oid, "size": size})
            elif size > PART:
                count = -(-size // PART)
                header = {
                    "chunk_size": str(PART),
                    **{f"{n + 1}": f"{address}/{n + 1}" for n in range(count)},
                }
                found.append(
                    {
                        **one,
                        "actions": {"upload": {"href": f"{address}/complete", "header": header}},
                    }
                )
            else:
                found.append({**one, "actions": {"upload": {"href": address}}})
        return {"transfer": "basic", "objects": found}

    def _content(self, path: str, body: bytes) -> tuple[Any, dict[str, str]]:
        oid, _, part = path.removeprefix("/lfs/").partition("/")
        if part and part != "complete":
            self.store.parts.setdefault(oid, {})[int(part)] = body
            self.store.puts.append(path)
            return {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if part:
            parts = self.store.parts.pop(oid)
            body = b"".join(parts[one["partNumber"]] for one in json.loads(body)["parts"])
        else:
            self.store.puts.append(path)
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "the content is not what was announced")
        self.store.lfs[oid] = body
        return {}, {}

    def _committed(self, name: str, repo: Repo, branch: str, body: bytes) -> Any:
        header, *operations = map(json.loads, body.splitlines())
        if header["value"].get("parentCommit") not in (None, repo.heads[branch]):
            raise _Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.files(branch))
        for one in operations:
            value = one["value"]
            if one["key"] == "lfsFile":
                if value["oid"] not in self.store.lfs:
                    raise _Refused(400, "LFS pointer pointed to a file that does not exist")
                files[value["path"]] = self.store.lfs[value["oid"]]
            elif one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                del files[value["path"]]
        sha = repo.commit(branch, self.store.committed(files), header["value"]["summary"])
        return {"commitUrl": f"{self.address}/{name}/commit/{sha}", "commitOid": sha}


def _mode(path: str, ignored: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(_LFS) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": path in ignored.split()}


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    found = {"rfilename": path, "size": len(content), "blobId": git_name(content)}
    if not path.endswith(_LFS):
        return found
    return {
        **found,
        "lfs": {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        },
    }
