"""Grammars are first compiled in a separate process, as some that clients may write take very long
or much memory: the process is ended then, which a thread cannot be.
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

_MEMORY = 2 << 30
_PROGRAM = Path(__file__).with_name("trial_worker.py")
_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None
# A fork must not use the pipes of its parent.
_owner = 0


def try_out(grammar: str, limits: Mapping[str, object]) -> None:
    """Raise `RequestError` if a grammar, with these `LLParserLimits`, cannot be compiled within
    bounds; other errors in it are for the caller.
    """
    with _lock:
        process = _ensure_process()
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([grammar, dict(limits)]) + "\n")
            process.stdin.flush()
            done = process.stdout.readline()
        except (OSError, ValueError):
            done = ""
        finally:
            timer.cancel()
        if not done:
            _end()
            bounds = f"more than {SECONDS:.0f} seconds, or {_MEMORY >> 30} GiB"
            raise RequestError(f"the format is not supported: it takes {bounds} to compile")


def _ensure_process() -> subprocess.Popen[str]:
    global _process, _owner
    if _process is not None and _owner == os.getpid() and _process.poll() is None:
        return _process
    _end()
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
            start_new_session=True,  # it ignores Ctrl-C
        )
    except OSError as error:
        raise QuantkitError(
            f"the process that tries out formats does not start: {error}"
        ) from error
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
        # A request that was not read.
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    _process = None
