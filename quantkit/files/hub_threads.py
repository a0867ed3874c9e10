"""Send requests to the hub in daemon threads, with a time limit.

Python waits at exit for the library's thread pools, which delays Ctrl-C, and the library's HTTP
client waits without a limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")
# How soon the main thread notices an error or a signal.
_TICK_SECONDS = 0.1


def result_in_time(request: Callable[[], _Answer], seconds: float) -> _Answer:
    """Run a function in a thread and return its result. Raises the function's errors, and
    `TimeoutError` if it takes longer.
    """
    # The client's own time limit applies to each address, and not to name resolution.
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
        # The function itself raised it.
        if answer.done():
            raise
        raise TimeoutError(f"no answer in {seconds:.0f} seconds") from error


def run_in_threads(
    tasks: Sequence[Callable[[], object]],
    num_threads: int,
    *,
    on_tick: Callable[[], object] = lambda: None,
) -> None:
    """Run functions in several threads. Raises the first error, after which no further function
    begins.

    Args:
        on_tick: called in this thread whenever a function ends, and ten times a second; after an
            error that it raises, no further function begins either.
    """
    waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    ended = threading.Event()
    for waiting_task in tasks:
        waiting.put(waiting_task)

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
    unfinished = len(tasks)
    try:
        while unfinished:
            try:
                # With a time limit, so that `on_tick` runs while all requests wait.
                error = answers.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                on_tick()
                continue
            if error is not None:
                raise error
            unfinished -= 1
            on_tick()
    finally:
        # Also after Ctrl-C. Daemon threads that still run do not delay the exit.
        ended.set()


class Stall:
    """Watches a number that grows; `require_growth` raises `TimeoutError` once it has not grown
    for this time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Below any value, so that the first one counts as growth.
        self._last = -1
        self._since = time.monotonic()

    def require_growth(self, value: int) -> None:
        """Compare the number with the last one; a `TimeoutError` if it has not grown for long."""
        now = time.monotonic()
        if value > self._last:
            self._last = value
            self._since = now
        elif now - self._since > self._seconds:
            raise TimeoutError(f"nothing was sent for {self._seconds:.0f} seconds")
