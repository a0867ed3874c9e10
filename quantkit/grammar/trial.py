"""Compile grammars first in a separate process. Some grammars that clients may write take very long
or much memory; a process can be ended then, a thread cannot.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from quantkit.errors import QuantkitError, RequestError

SECONDS = 5.0
"""Of a compilation; the same in the server's own process takes no longer."""

# Bytes of the process's address space.
_MEMORY = 2 << 30
_PROGRAM = Path(__file__).with_name("trial_worker.py")
_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None
# The process that started `_process`. A fork must not use the pipes of its parent.
_owner = 0


def try_out(grammar: str, limits: Mapping[str, object]) -> None:
    """Raise `RequestError` if a grammar, with these `LLParserLimits`, cannot be compiled within
    bounds; other errors in it are for the caller.
    """
    with _lock:
        process = _ensure_process()
        # Ending the process also ends the `readline` below, which has no timeout.
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([grammar, dict(limits)]) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        # The process may end before it has read the request.
        except (OSError, ValueError):
            reply = ""
        finally:
            timer.cancel()
        if not reply:
            _end()
            bounds = f"more than {SECONDS:.0f} seconds, or {_MEMORY >> 30} GiB"
            raise RequestError(f"the format is not supported: it takes {bounds} to compile")


def _ensure_process() -> subprocess.Popen[str]:
    global _process, _owner
    if _process is not None and _owner == os.getpid() and _process.poll() is None:
        return _process
    _end()
    # -S omits site-packages, so that the process starts sooner; it gets this folder instead.
    spec = importlib.util.find_spec("llguidance")
    if spec is not None and spec.origin:
        folder = str(Path(spec.origin).parents[1])
    else:
        folder = ""
    try:
        _process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(_MEMORY), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C in the terminal does not reach a process of another session.
            start_new_session=True,
        )
    except OSError as error:
        raise QuantkitError(f"the process that tests formats does not start: {error}") from error
    _owner = os.getpid()
    return _process


@atexit.register
def _end() -> None:
    global _process
    if _process is None:
        return
    if _owner == os.getpid():
        _process.kill()
        _process.wait()
    for pipe in (_process.stdin, _process.stdout):
        # Closing fails if the pipe contains a request that the process did not read.
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    _process = None
