"""Processes that begin with torch imported, which takes seconds each time: copies of one that
has done no more.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import CompletedProcess

COMMAND = "from quantkit.cli.main import main; main()"
"""The code of quantkit's command."""

_IMPATIENT = "import quantkit.distributed.group\nquantkit.distributed.group._PATIENCE = 1.0\n"
"""After an error, processes wait so long for one another, not for the five seconds that a
launcher may need.
"""

_PATIENCE = 240
_HERE = Path(__file__).parent


def command(*arguments: str | Path) -> list[str]:
    """A command line that does what ``python ARGUMENTS`` does; they begin with ``-c CODE`` or
    ``-m MODULE``.
    """
    return [sys.executable, "-IS", str(_HERE / "fork_client.py"), _server(), *map(str, arguments)]


def quantkit(*arguments: str | Path) -> list[str]:
    """A command line that does what ``quantkit ARGUMENTS`` does."""
    return command("-m", "quantkit.cli", *arguments)


def launched(count: int, *arguments: str | Path) -> list[str]:
    """A command line with which torchrun starts this number of ``quantkit ARGUMENTS``."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
    ]
    return [*launcher, "--no-python", *command("-c", _IMPATIENT + COMMAND, *arguments)]


def python(code: str, *arguments: str | Path) -> CompletedProcess[str]:
    """What ``python -c CODE ARGUMENTS`` does."""
    return _all([{}], code, *arguments)[0]


def group(count: int, code: str, *arguments: str | Path) -> list[CompletedProcess[str]]:
    """So many processes that do the same together, as a launcher starts them; the first keeps
    what they share.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return _all(ranks, _IMPATIENT + code, *arguments)


def _all(
    environments: list[dict[str, str]], code: str, *arguments: str | Path
) -> list[CompletedProcess[str]]:
    given = command("-c", code, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        streams = [
            [Path(folder, f"{stream}{n}") for stream in ("out", "err")]
            for n in range(len(environments))
        ]
        children = []
        for own, (out, err) in zip(environments, streams, strict=True):
            with out.open("w") as its_out, err.open("w") as its_err:
                environment = {**os.environ, **own}
                children.append(
                    subprocess.Popen(given, stdout=its_out, stderr=its_err, env=environment)
                )
        try:
            codes = [child.wait(_PATIENCE) for child in children]
            said = [[stream.read_text() for stream in two] for two in streams]
        finally:
            for child in children:
                child.kill()
                child.wait()
    return [
        CompletedProcess(given, exit_code, *two) for exit_code, two in zip(codes, said, strict=True)
    ]


@functools.cache
def _server() -> str:
    """The address of the process that is copied."""
    folder = tempfile.TemporaryDirectory(prefix="fork")
    address = Path(folder.name, "socket")
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "fork_server.py"), str(address)],
        stdin=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },  # code may import tests' modules
    )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    while not address.exists():
        assert server.poll() is None, "the server ended"
        time.sleep(0.02)
    return str(address)
