"""Threads for requests to a hub."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from quantkit.files.hub_threads import result_in_time, run_in_threads


def test_a_result_or_an_error_is_handed_on_and_a_late_one_is_not_waited_for() -> None:
    assert result_in_time(lambda: 3, 60) == 3
    with pytest.raises(KeyError, match="x"):
        result_in_time(lambda: {}["x"], 60)
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in 0 seconds"):
        result_in_time(never.wait, 0.01)
    never.set()


def test_the_first_error_ends_all_and_nothing_more_begins() -> None:
    begun: list[int] = []

    def task(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise ValueError("one")
        return number

    with pytest.raises(ValueError, match="one"):
        run_in_threads([partial(task, number) for number in range(100)], 1)
    assert begun == [0, 1]
    ticks: list[int] = []
    results = run_in_threads(
        [partial(task, number) for number in range(2, 7)], 2, on_tick=lambda: ticks.append(1)
    )
    assert results == [2, 3, 4, 5, 6]
    assert ticks
    assert run_in_threads([], 2) == []
