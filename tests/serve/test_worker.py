"""The thread that runs a server's model: what goes wrong with a step, and how it ends."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.errors import NonFiniteError, QuantkitError
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Delta, Request
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.runtime.scheduler import Scheduler
from quantkit.serve.worker import TimeLimitError, Worker

WITHOUT_END = SamplingParams(logit_bias={2: -100.0})


@pytest.fixture
def worker(demo_model: Path) -> Any:
    model, tokenizer = quantkit.load(demo_model, backend="cpu-exact")
    found = Worker(Engine(model, 128, slots=2), tokenizer, max_jobs=3)
    yield found
    found.stop()


def _all(arrived: queue.Queue[Delta | QuantkitError]) -> list[int]:
    """The tokens of a continuation, once it has ended."""
    tokens: list[int] = []
    while True:
        event = arrived.get(timeout=60)
        assert isinstance(event, Delta)
        tokens += event.token_ids
        if event.completion is not None:
            assert event.completion.token_ids == tokens
            return tokens


@pytest.mark.parametrize(
    ("error", "message"), [(NonFiniteError("NaN"), "NaN"), (ValueError("broken"), "internal error")]
)
def test_a_step_that_fails_ends_all_that_run_and_no_others(
    error: Exception, message: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Scheduler.step

    def failing(self: Scheduler) -> Any:
        monkeypatch.setattr(Scheduler, "step", step)
        raise error

    monkeypatch.setattr(Scheduler, "step", failing)
    first: queue.Queue[Delta | QuantkitError] = queue.Queue()
    assert worker.submit([Request([1, 5], 4)], (), first.put) is not None
    found = first.get(timeout=60)
    assert isinstance(found, QuantkitError)
    assert message in str(found)
    second: queue.Queue[Delta | QuantkitError] = queue.Queue()
    assert worker.submit([Request([1, 5], 4)], (), second.put) is not None
    assert len(_all(second)) == 4
    assert worker.num_jobs == 0
    assert first.empty()


def test_what_is_too_many_is_refused_and_what_is_cancelled_is_not_delivered(worker: Worker) -> None:
    arrived: queue.Queue[Delta | QuantkitError] = queue.Queue()
    long = Request([1, 5], 120, WITHOUT_END)
    jobs = [worker.submit([long], (), arrived.put) for _ in range(3)]
    assert worker.submit([long], (), arrived.put) is None
    for job in jobs:
        assert job is not None
        worker.cancel(job)
    last: queue.Queue[Delta | QuantkitError] = queue.Queue()
    while worker.submit([Request([1, 5], 4)], (), last.put) is None:
        pass
    assert len(_all(last)) == 4
    assert all(one.completion is None for one in list(arrived.queue) if isinstance(one, Delta))


def test_a_request_that_takes_too_long_ends_and_others_go_on(worker: Worker) -> None:
    worker._time_limit = 0.0
    arrived: queue.Queue[Delta | QuantkitError] = queue.Queue()
    assert worker.submit([Request([1, 5], 120, WITHOUT_END)], (), arrived.put) is not None
    found = arrived.get(timeout=60)
    assert isinstance(found, TimeLimitError)
    assert "took more than 0 seconds" in str(found)
    worker._time_limit = 60.0
    assert worker.submit([Request([1, 5], 4, WITHOUT_END)], (), arrived.put) is not None
    assert len(_all(arrived)) == 4
    assert worker.num_jobs == 0


def test_a_worker_that_stops_leaves_no_one_waiting(worker: Worker) -> None:
    arrived: queue.Queue[Delta | QuantkitError] = queue.Queue()
    assert worker.submit([Request([1, 5], 120, WITHOUT_END)], (), arrived.put) is not None
    worker.stop()
    *_, last = list(arrived.queue)
    assert isinstance(last, QuantkitError)
    assert "shutting down" in str(last)
    assert worker.submit([Request([1, 5], 4)], (), arrived.put) is None


def test_a_list_of_prompts_leaves_a_turn_to_others(worker: Worker) -> None:
    """Two sequences run at the same time; the other request ends long before those that came
    earlier.
    """
    ended: queue.Queue[str] = queue.Queue()

    def count(name: str) -> Any:
        return lambda delta: ended.put(name) if delta.completion is not None else None

    many = [Request([1, 5 + number], 8, WITHOUT_END) for number in range(20)]
    assert worker.submit(many, (), count("many")) is not None
    assert worker.submit([Request([1, 5], 8, WITHOUT_END)], (), count("alone")) is not None
    order = [ended.get(timeout=60) for _ in range(21)]
    assert order.index("alone") < 6
