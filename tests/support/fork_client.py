"""Stands for a process that `fork_server.py` forks: has its streams, passes signals on to it, and
ends as it does.

python fork_client.py SOCKET {-c CODE | -m MODULE} [ARGUMENT ...]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

STREAMS = ("stdin", "stdout", "stderr")


def main(address: str, arguments: list[str]) -> int:
    streams = [name for name in STREAMS if getattr(sys, name) is not None]
    request = {
        "arguments": arguments,
        "open": streams,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"!"], [STREAMS.index(name) for name in streams])
        connection.sendall(json.dumps(request).encode() + b"\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        code = int(connection.recv(16))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))
