"""Send requests to the hub in daemon threads, with a time limit.

Python waits at exit for the library's thread pools, which delays Ctrl-C, and the library's HTTP
client waits without a limit.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

_Answer = TypeVar("_Answer")
# How soon the main thread notices a signal, and reports progress.
_TICK_SECONDS = 0.1


def result_in_time(request: Callable[[], _Answer], seconds: float) -> _Answer:
    """Run a function in a thread and return its result. Raises the function's errors, and
    `TimeoutError` if it takes longer.
    """
    # The client's own time limit applies to each address, and not to name resolution.
    return run_in_threads([request], 1, seconds=seconds)[0]


def run_in_threads(
    tasks: Sequence[Callable[[], _Answer]],
    num_threads: int,
    *,
    seconds: float = math.inf,
    on_tick: Callable[[], object] = lambda: None,
) -> list[_Answer]:
    """Run functions in several threads and return their results. Raises the first error, after
    which no further function begins, and `TimeoutError` if all take longer than `seconds`.

    Args:
        on_tick: called in this thread when functions end, and ten times a second; after an error
            that it raises, no further function begins either.
    """
    answers: list[Future[_Answer]] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended = threading.Event()
    for index in range(len(tasks)):
        answers.append(Future())
        waiting.put(index)

    def run() -> None:
        while not ended.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers[index].set_result(tasks[index]())
            except Exception as error:
                # Before the main thread sees the error, so that no other function begins.
                ended.set()
                answers[index].set_exception(error)

    for _ in range(min(num_threads, len(tasks))):
        threading.Thread(target=run, name="quantkit-hub", daemon=True).start()
    deadline = time.monotonic() + seconds
    pending = set(answers)
    try:
        while pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"no answer in {seconds:.0f} seconds")
            waited = wait(pending, min(_TICK_SECONDS, remaining), FIRST_COMPLETED)
            pending = waited.not_done
            for answer in waited.done:
                # Raises the error of its function.
                answer.result()
            on_tick()
    finally:
        # Also after Ctrl-C. Daemon threads that still run do not delay the exit.
        ended.set()
    return [answer.result() for answer in answers]
