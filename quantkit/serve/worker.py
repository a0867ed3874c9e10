"""Run a model in a thread: requests start and end while others run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quantkit.errors import QuantkitError, RequestError
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation, Share
from quantkit.runtime.reader import CompletionReader
from quantkit.runtime.request import Delta, Request
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


Deliver = Callable[["Delta | QuantkitError"], None]
"""Called from the worker's thread; an error is the last thing that comes."""


class TimeLimitError(RequestError):
    """A request took longer than it may."""


@dataclass(eq=False)
class Job:
    """The request of one client: continuations of one or several prompts.

    Attributes:
        ends_by: on the clock of `time.monotonic`.
        num_unfinished: continuations that have not ended.
    """

    requests: Sequence[Request]
    stop: Sequence[str]
    deliver: Deliver
    ends_by: float
    num_unfinished: int = 0
    cancelled: bool = False
    readers: dict[Generation, CompletionReader] = field(default_factory=dict)


class Worker:
    """Runs the jobs of a server in an engine, which it has for itself; its methods may be called
    from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_jobs: int,
        max_running: int | None = None,
        time_limit: float = math.inf,
    ) -> None:
        """Start the thread.

        Args:
            max_jobs: that wait and run at the same time; `submit` refuses more.
            max_running: see `Scheduler`.
            time_limit: seconds that a job may wait and run.
        """
        self.max_jobs = max_jobs
        self._max_running = max_running
        self._time_limit = time_limit
        self._engine = engine
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(engine, max_running=max_running)
        # Only the worker's thread uses the scheduler; jobs wait here until it takes them.
        self._new: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._job_of: dict[Generation, Job] = {}
        # Guards `_new`, `_jobs` and `_stopping`, and wakes the thread.
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quantkit-serve", daemon=True)
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        """Count the jobs that wait or run."""
        with self._changed:
            return len(self._new) + len(self._jobs)

    @property
    def num_reused_tokens(self) -> int:
        """Count the tokens of prompts that the cache contained, so that they were not computed."""
        return self._scheduler.num_reused_tokens

    @property
    def num_proposed_tokens(self) -> int:
        """Count the tokens that were proposed, right or wrong."""
        return self._engine.num_proposed_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Count the proposed tokens that were right."""
        return self._engine.num_accepted_tokens

    @property
    def alive(self) -> bool:
        """Tell whether the worker can run jobs."""
        return self._thread.is_alive() and not self._stopping

    def submit(
        self, requests: Sequence[Request], stop: Sequence[str], deliver: Deliver
    ) -> Job | None:
        """Start the requests of one client; their answers are passed to `deliver`.

        Returns:
            None if there are too many jobs, or the worker is stopping.
        """
        samples = sum(request.samples for request in requests)
        job = Job(
            requests,
            stop,
            deliver,
            ends_by=time.monotonic() + self._time_limit,
            num_unfinished=samples,
        )
        with self._changed:
            if not self.alive or len(self._new) + len(self._jobs) >= self.max_jobs:
                return None
            self._new.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request: it ends with the next step, and nothing more is delivered."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def stop(self) -> None:
        """End all requests, and the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Run steps while there are jobs, until the worker is stopped."""
        while True:
            with self._changed:
                # Without jobs the thread sleeps.
                while not (self._stopping or self._new or self._jobs):
                    self._changed.wait()
                if self._stopping:
                    unfinished = [*self._new, *self._jobs]
                    break
                new_jobs = list(self._new)
                self._new.clear()
                self._jobs += new_jobs
            # The lock is released: requests may be submitted and cancelled during a step.
            try:
                self._step(new_jobs)
            except Exception as error:
                # A step serves many clients: none of them may wait forever.
                self._fail(error)
        for job in unfinished:
            self._deliver(job, QuantkitError("the server is shutting down"))

    def _step(self, begun: Sequence[Job]) -> None:
        """Start new jobs, end cancelled and late ones, and run one step for the others."""
        for job in begun:
            try:
                self._begin(job)
            except RequestError as error:
                self._give_up(job)
                self._deliver(job, error)
        # Copies: `_give_up` removes jobs from the list.
        cancelled_jobs = [job for job in self._jobs if job.cancelled]
        for job in cancelled_jobs:
            self._give_up(job)
        now = time.monotonic()
        late_jobs = [job for job in self._jobs if job.ends_by <= now]
        for job in late_jobs:
            self._give_up(job)
            time_error = TimeLimitError(f"the request took more than {self._time_limit:g} seconds")
            self._deliver(job, time_error)
        if not self._scheduler.busy:
            return
        for generation in self._scheduler.step():
            owner = self._job_of.get(generation)
            # Another continuation of the same job may have ended it with an error.
            if owner is None:
                continue
            try:
                self._read(owner, generation)
            # The error of one continuation ends its job, and no other one.
            except QuantkitError as error:
                self._give_up(owner)
                self._deliver(owner, error)

    def _begin(self, job: Job) -> None:
        """Add the requests of a job to the scheduler, which counts them as those of one client."""
        # The client may have disconnected while the job waited.
        if job.cancelled:
            return
        share = Share()
        for number, request in enumerate(job.requests):
            for generation in self._scheduler.add(request, share):
                job.readers[generation] = CompletionReader(
                    number, generation, self._tokenizer, job.stop
                )
                self._job_of[generation] = job

    def _read(self, job: Job, generation: Generation) -> None:
        """Deliver the new tokens of a continuation, and end it at a stop string."""
        reader = job.readers[generation]
        num_read_tokens = reader.num_tokens
        num_read_pieces = len(reader.pieces)
        if reader.read() and generation.finish_reason is None:
            self._scheduler.end(generation)
        logprobs = None
        prompt_logprobs = None
        if generation.logprobs is not None:
            # With echo, the log-probabilities begin with the prompt's.
            num_echoed = len(generation.request.prompt) if generation.request.echo else 0
            start = num_echoed + num_read_tokens
            logprobs = generation.logprobs.cut(num_echoed + reader.num_tokens, start=start)
            if num_echoed and not num_read_tokens:
                prompt_logprobs = generation.logprobs.cut(num_echoed)
        completion = None if generation.finish_reason is None else reader.completion()
        delta = Delta(
            generation.sample,
            text="".join(reader.pieces[num_read_pieces:]),
            token_ids=generation.tokens[num_read_tokens : reader.num_tokens],
            logprobs=logprobs,
            completion=completion,
            prompt=reader.number,
            prompt_logprobs=prompt_logprobs,
        )
        self._deliver(job, delta)
        if completion is not None:
            # This also frees the constraint of the continuation, while its siblings run.
            del self._job_of[generation], job.readers[generation]
            job.num_unfinished -= 1
            if not job.num_unfinished:
                self._end(job)

    def _give_up(self, job: Job) -> None:
        """End the continuations of a job that still run, and the job."""
        for generation in job.readers:
            if generation.finish_reason is None:
                self._scheduler.end(generation)
        self._end(job)

    def _end(self, job: Job) -> None:
        """Remove a job and its continuations."""
        with self._changed:
            self._jobs.remove(job)
        for generation in job.readers:
            self._job_of.pop(generation, None)

    def _fail(self, error: Exception) -> None:
        """Report an error of a step to all running jobs, and continue with a new scheduler."""
        if not isinstance(error, QuantkitError):
            _log.error("a step failed", exc_info=error)
        with self._changed:
            failed = self._jobs
            self._jobs = []
        self._job_of.clear()
        # The step was cut off, so the slots may not contain what the scheduler recorded.
        self._scheduler = Scheduler(self._engine, max_running=self._max_running)
        # Texts of other errors may tell clients about the machine; the log has them.
        if isinstance(error, QuantkitError):
            client_error = error
        else:
            client_error = QuantkitError("internal error")
        for job in failed:
            self._deliver(job, client_error)

    def _deliver(self, job: Job, event: Delta | QuantkitError) -> None:
        """Pass an event to the client of a job, unless it is cancelled."""
        if not job.cancelled:
            job.deliver(event)
