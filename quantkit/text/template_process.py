"""Run chat templates in a separate process, as a template comes with a model from somebody else.

Jinja's sandbox separates it from the machine. The limits of the process bound its time and memory.
macOS does not limit memory; Windows limits neither, and only the timer here ends a template.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.base.json_values import format_value
from quantkit.errors import QuantkitError, RequestError

MAX_LENGTH = 1 << 22
"""Characters of a rendered conversation."""
_PROGRAM = Path(__file__).with_name("template_worker.py")
_SECONDS = 5.0
_MEMORY = 1 << 30
# Multiple of the limit of CPU time, for other processes.
_WALL_CLOCK = 6


@dataclass
class Budget:
    """What remains for the renderings that share it, and whether they are repeatable.

    Attributes:
        seconds: of CPU time.
        length: characters of all results.
        repeatable: whether a template gets the same date and the same random choices each time.
    """

    seconds: float = _SECONDS
    length: int = MAX_LENGTH
    repeatable: bool = False

    @property
    def spent(self) -> bool:
        return self.seconds <= 0 or self.length < 0


def check_template(source: str) -> str | None:
    """Compile a template, and return the error in its syntax; None if Jinja compiles it."""
    answer = _answer({"source": source}, _SECONDS)
    if "error" in answer:
        return str(answer["reason"])
    return None


def render(
    source: str, variables: Mapping[str, Any], unknown: tuple[str, ...], budget: Budget
) -> dict[str, Any]:
    """Render a template.

    Args:
        variables: plain values, as JSON has them, and tuples.
        unknown: special tokens that no file spells; printing one is an error.

    Returns:
        The ``text``; or the ``error``, which is ``refusal``, ``token``, ``length`` or ``failure``,
        and its ``reason``.

    Raises:
        RequestError: if a variable is not a plain value.
    """
    if budget.spent:
        return {"error": "failure", "reason": "it takes too long", "seconds": 0}
    try:
        request = {"source": source, "variables": _plain(dict(variables)), "unknown": unknown}
    except RecursionError as error:
        raise RequestError("a variable of the chat template is nested too deep") from error
    request |= {"repeatable": budget.repeatable, "max_length": MAX_LENGTH}
    answer = _answer(request, budget.seconds)
    budget.seconds -= answer["seconds"]
    budget.length -= len(answer.get("text", ""))
    return answer


class _Worker:
    """The process, with pipes for requests and answers."""

    def __init__(self) -> None:
        # Both packages are usually in one folder, which a dict lists once.
        paths: dict[str, None] = {}
        for name in ("jinja2", "markupsafe"):
            module = importlib.util.find_spec(name)
            if module and module.origin:
                paths[str(Path(module.origin).parents[1])] = None
        try:
            # Without site-packages (-S) the process starts sooner. In a session of its own it does
            # not get Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(_MEMORY), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise QuantkitError(
                f"the process for chat templates does not start: {error}"
            ) from error
        self._owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Return whether it runs, and was not started by the parent of a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def answer(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a request and read the answer; None if the process ended without one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Python's own format keeps tuples, which JSON does not.
        data = marshal.dumps({**request, "seconds": seconds})
        timer = threading.Timer(_WALL_CLOCK * seconds, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
            # JSON escapes a character in at most 12 bytes, as a pair of surrogates.
            answer: dict[str, Any] = json.loads(self._process.stdout.readline(13 * MAX_LENGTH))
            return answer
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process, unless it is another's, and close the pipes."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Closing writes what is buffered: a request that was not read.
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


_lock = threading.Lock()
_worker: _Worker | None = None


def _answer(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Let the worker answer a request; a worker that ended, by its limits or otherwise, is replaced
    for the next request.
    """
    global _worker
    with _lock:
        if _worker is None or not _worker.usable:
            _end()
            _worker = _Worker()
        answer = None
        try:
            answer = _worker.answer(request, seconds)
        finally:
            # Also after Ctrl-C, when the next request would read the answer to this one.
            if answer is None:
                _end()
    memory = f"more than {_MEMORY >> 20} MiB of memory"
    if answer is None:
        answer = {
            "error": "failure",
            "reason": f"it takes more than {seconds:.3g} seconds, or {memory}",
        }
        answer["seconds"] = seconds
    elif answer.get("error") == "memory":
        answer |= {"error": "failure", "reason": f"it takes {memory}"}
    return answer


@atexit.register
def _end() -> None:
    global _worker
    if _worker is not None:
        _worker.end()
        _worker = None


def _plain(value: Any) -> Any:
    """Copy a value as the worker can read it, with Python's own classes only."""
    if value is None or isinstance(value, bool):
        return value
    # Subclasses, such as enums of strings, cannot be marshalled.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if type(value) in (list, tuple):
            return type(value)(map(_plain, value))
        return list(map(_plain, value))
    raise RequestError(
        "a template variable must be a plain value",
        found=format_value(value),
        expected="values as in JSON",
    )
