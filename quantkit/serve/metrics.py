"""Counts and times of a server, as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from quantkit.runtime.request import Request
from quantkit.serve.worker import Delta, Worker

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """What a server has counted.

    Attributes:
        refused: requests that found too many others.
    """

    def __init__(self, worker: Worker) -> None:
        self._registry = own = CollectorRegistry()
        self.refused = Counter(
            "quantkit_refused_requests", "Requests that found too many others.", registry=own
        )
        self._ended = Counter(
            "quantkit_requests", "Continuations that ended.", ["finish_reason"], registry=own
        )
        self._prompts = Counter("quantkit_prompt_tokens", "Tokens of prompts.", registry=own)
        self._new = Counter("quantkit_generation_tokens", "New tokens.", registry=own)
        self._first = Histogram(
            "quantkit_first_token_seconds", "Until the first token.", buckets=_SECONDS, registry=own
        )
        self._next = Histogram(
            "quantkit_next_token_seconds",
            "Between two tokens of a continuation.",
            buckets=_SECONDS,
            registry=own,
        )
        running = Gauge("quantkit_running_requests", "Requests that wait or run.", registry=own)
        running.set_function(lambda: worker.jobs)
        reused = Gauge(
            "quantkit_reused_prompt_tokens", "Tokens of prompts that the cache held.", registry=own
        )
        reused.set_function(lambda: worker.num_reused_tokens)
        proposed = Gauge(
            "quantkit_proposed_tokens", "Tokens that speculative decoding proposed.", registry=own
        )
        proposed.set_function(lambda: worker.num_proposed_tokens)
        accepted = Gauge(
            "quantkit_accepted_tokens", "Proposed tokens that were right.", registry=own
        )
        accepted.set_function(lambda: worker.num_accepted_tokens)

    def count_requests(self, requests: Sequence[Request]) -> Callable[[Delta], None]:
        """Count the requests of a client now, and then what comes of them."""
        self._prompts.inc(sum(len(request.prompt) for request in requests))
        began = time.perf_counter()
        # When each continuation had its last token.
        last = dict[tuple[int, int], float]()

        def count_delta(delta: Delta) -> None:
            continuation = (delta.prompt, delta.sample)
            moment = time.perf_counter()
            self._new.inc(len(delta.token_ids))
            # Several come with one step.
            for token in range(len(delta.token_ids)):
                if continuation in last:
                    times = self._next
                else:
                    times = self._first
                times.observe(0 if token else moment - last.get(continuation, began))
                last[continuation] = moment
            if delta.completion is not None:
                self._ended.labels(delta.completion.finish_reason).inc()

        return count_delta

    def export_text(self) -> tuple[bytes, str]:
        """Return all of it as text, with the type of that."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
