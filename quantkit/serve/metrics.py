"""Count requests and tokens of a server, and measure times, for Prometheus."""

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

from quantkit.runtime.request import Delta, Request
from quantkit.serve.worker import Worker

# Buckets for the first token, which waits for a prompt, and for the next ones.
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """The counters of a server.

    Attributes:
        refused: requests that found too many others.
    """

    def __init__(self, worker: Worker) -> None:
        # The global registry would refuse the metrics of a second server in the process.
        self._registry = registry = CollectorRegistry()
        self.refused = Counter(
            "quantkit_refused_requests", "Requests that found too many others.", registry=registry
        )
        self._ended = Counter(
            "quantkit_requests",
            "Continuations that have ended, of all requests.",
            ["finish_reason"],
            registry=registry,
        )
        self._prompts = Counter("quantkit_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._new = Counter("quantkit_generation_tokens", "New tokens.", registry=registry)
        self._first = Histogram(
            "quantkit_first_token_seconds",
            "Until the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._next = Histogram(
            "quantkit_next_token_seconds",
            "Between two tokens of a continuation.",
            buckets=_SECONDS,
            registry=registry,
        )
        # Values that the worker counts are read when Prometheus asks for them.
        running = Gauge(
            "quantkit_running_requests", "Requests of clients that wait or run.", registry=registry
        )
        running.set_function(lambda: worker.num_jobs)
        reused = Gauge(
            "quantkit_reused_prompt_tokens",
            "Tokens of prompts that the cache held.",
            registry=registry,
        )
        reused.set_function(lambda: worker.num_reused_tokens)
        proposed = Gauge(
            "quantkit_proposed_tokens",
            "Tokens that speculative decoding proposed.",
            registry=registry,
        )
        proposed.set_function(lambda: worker.num_proposed_tokens)
        accepted = Gauge(
            "quantkit_accepted_tokens", "Proposed tokens that were right.", registry=registry
        )
        accepted.set_function(lambda: worker.num_accepted_tokens)

    def begin_counting(self, requests: Sequence[Request]) -> Callable[[Delta], None]:
        """Count the requests of a client, and return a function that counts their answers."""
        self._prompts.inc(sum(len(request.prompt) for request in requests))
        start_time = time.perf_counter()
        # When each continuation had its last token.
        last_times: dict[tuple[int, int], float] = {}

        def count_delta(delta: Delta) -> None:
            continuation = (delta.prompt, delta.sample)
            now = time.perf_counter()
            self._new.inc(len(delta.token_ids))
            for index in range(len(delta.token_ids)):
                if continuation in last_times:
                    histogram = self._next
                else:
                    histogram = self._first
                # Further tokens of one step arrive together with its first one.
                seconds = 0.0 if index else now - last_times.get(continuation, start_time)
                histogram.observe(seconds)
                last_times[continuation] = now
            if delta.completion is not None:
                self._ended.labels(delta.completion.finish_reason).inc()

        return count_delta

    def export_text(self) -> tuple[bytes, str]:
        """Export all metrics as text, with its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
