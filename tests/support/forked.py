"""Processes that begin with torch imported, which takes seconds each time: copies of one that has done no more."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_PATIENCE = 240
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "quantkit.cli.main"])


def python(code: str, *arguments: str | Path) -> CompletedProcess[str]:
    """What ``python -c CODE ARGUMENTS`` does."""
    return _all([{}], code, *arguments)[0]


def group(count: int, code: str, *arguments: str | Path) -> list[CompletedProcess[str]]:
    """So many processes that do the same together, as a launcher starts them; the first keeps what they share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return _all(ranks, code, *arguments)


def _all(environments: list[dict[str, str]], code: str, *arguments: str | Path) -> list[CompletedProcess[str]]:
    given = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        streams = [[str(Path(folder, f"{stream}{n}")) for stream in ("out", "err")] for n in range(len(environments))]
        here = dict(os.environ)
        children = [
            _context.Process(target=_child, args=(code, given, {**here, **own}, *two))
            for own, two in zip(environments, streams, strict=True)
        ]
        for child in children:
            child.start()
        try:
            for child in children:
                child.join(_PATIENCE)
            codes = [child.exitcode for child in children]
            assert None not in codes, "a process does not end"
            said = [[Path(stream).read_text() for stream in two] for two in streams]
        finally:
            for child in children:
                child.kill()
                child.join()
                child.close()
    return [CompletedProcess(given, exit_code or 0, *two) for exit_code, two in zip(codes, said, strict=True)]


def _child(code: str, arguments: list[str], environment: Mapping[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
