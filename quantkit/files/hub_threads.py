"""Requests to the hub in daemon threads, with a time limit.

The library's thread pools are waited for at exit, which delays Ctrl-C, and its HTTP client waits
without a limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")
_TICK_SECONDS = 0.1


def result_in_time(request: Callable[[], _Answer], seconds: float) -> _Answer:
    """Return the result of a function that runs in a thread, which covers name resolution too: the
    client's time limit applies to each address. Raises what it raises, and `TimeoutError` if it
    takes longer.
    """
    answer = Future[_Answer]()

    def run() -> None:
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="quantkit-hub", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():
            raise
        raise TimeoutError(f"no answer in {seconds:.0f} seconds") from error


def run_in_threads(
    tasks: Sequence[Callable[[], object]],
    num_threads: int,
    *,
    on_tick: Callable[[], object] = lambda: None,
) -> None:
    """Run functions in several threads. The first error is raised, and no further one begins then.

    Args:
        on_tick: called in this thread whenever a function ends, and ten times a second; what it
            raises ends the rest.
    """
    waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    ended = threading.Event()
    for one in tasks:
        waiting.put(one)

    def run() -> None:
        while not ended.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                task()
                answers.put(None)
            except Exception as error:
                ended.set()
                answers.put(error)

    for _ in range(min(num_threads, len(tasks))):
        threading.Thread(target=run, name="quantkit-hub", daemon=True).start()
    left = len(tasks)
    try:
        while left:
            try:
                error = answers.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                on_tick()
                continue
            if error is not None:
                raise error
            left -= 1
            on_tick()
    finally:
        ended.set()


class Stall:
    """Watches a number that grows; `require_growth` raises `TimeoutError` once it has not grown
    for this time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last, self._since = -1, time.monotonic()

    def require_growth(self, value: int) -> None:
        """Compare the number with the last one."""
        now = time.monotonic()
        if value > self._last:
            self._last = value
            self._since = now
        elif now - self._since > self._seconds:
            raise TimeoutError(f"nothing was sent for {self._seconds:.0f} seconds")
