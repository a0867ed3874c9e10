"""A Python that has torch and quantkit imported, and forks for each program that `fork_client.py`
sends it.

    python fork_server.py SOCKET

It ends with its standard input. A program starts as one of a fresh interpreter does, with the
client's streams, folder and environment, and ends as one does, with its exit functions and the last
flush of the streams.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "quantkit.cli.main",
    "quantkit.jobs.convert.convert",
    "quantkit.jobs.quantize.quantize",
    "quantkit.jobs.inference.load",
    "quantkit.quality.verify",
    "quantkit.runtime.chat_session",
)
STREAMS = ("stdin", "stdout", "stderr")


def serve(address: str) -> dict[str, Any]:
    """Fork for each request; returns in the forked process, with its request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    with connection.makefile() as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if process := os.fork():
        for stream in streams:
            os.close(stream)
        _watch(process, connection)
    connection.close()
    return {**request, "streams": dict(zip(request["open"], streams, strict=True))}


def _watch(process: int, connection: socket.socket) -> None:
    """Pass signals on to a process, which ends with its client, and report its exit code."""

    def pass_on() -> None:
        with contextlib.suppress(ProcessLookupError, ConnectionError):  # one that has just ended
            while number := connection.recv(1):
                os.kill(process, number[0])
            os.kill(process, signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ConnectionError):  # a client that was killed
        connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Take over streams, folder, environment and arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(STREAMS):
        before = getattr(sys, name)
        if (given := request["streams"].get(name)) is None:
            os.close(number)
            made = None
        else:
            os.dup2(given, number)
            made = open(  # noqa: SIM115
                number,
                "w" if number else "r",
                buffering=1 if number == 2 else -1,
                encoding=before.encoding,
                errors=before.errors,
                closefd=False,
            )
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    for given in request["streams"].values():
        os.close(given)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def run(arguments: list[str]) -> int:
    """Run a program as Python does; its exit code, or minus the signal that Python then ends
    with.
    """
    way, program, *rest = arguments
    sys.argv[:] = [way, *rest]
    sys.path[0] = "" if way == "-c" else os.getcwd()
    code: object = None
    try:
        if way == "-c":
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        shown = error.with_traceback(
            error.__traceback__ and error.__traceback__.tb_next
        )  # without this frame
        sys.excepthook(type(error), shown, shown.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    # what this may print; within a namedtuple of an exit function, warnings cannot be filtered
    gc.collect()
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120  # as Python has it
    return code or 0


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for ignored in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)
    wanted = serve(sys.argv[1])
    become(wanted)
    end = run(wanted["arguments"])
    if end < 0:
        signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    os._exit(end & 0xFF)
