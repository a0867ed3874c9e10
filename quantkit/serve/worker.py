"""The thread that runs a model: requests come and go while others run."""

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
from quantkit.runtime.reader import Reader
from quantkit.runtime.request import Completion, Logprobs, Request
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta:
    """What a step added to a continuation.

    Attributes:
        sample: the number of the continuation, among those of its prompt.
        text: new text; may be empty, as some is held back until it is known to be no stop string.
        token_ids: new tokens.
        logprobs: of `token_ids`, if requested.
        completion: all of it, once it has ended.
        prompt: the number of the prompt.
        prompt_logprobs: of the prompt's tokens, if requested, with what is delivered first.
    """

    sample: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    completion: Completion | None = None
    prompt: int = 0
    prompt_logprobs: Logprobs | None = None


Deliver = Callable[["Delta | QuantkitError"], None]
"""Called from the worker's thread; an error is the last thing that comes."""


class TimeLimitError(RequestError):
    """A request took longer than it may."""


@dataclass(eq=False)
class Job:
    """What one client requested: continuations of one or several prompts.

    Attributes:
        ends_by: on the clock of `time.monotonic`.
        left: continuations that have not ended.
    """

    requests: Sequence[Request]
    stop: Sequence[str]
    deliver: Deliver
    ends_by: float
    num_unfinished: int = 0
    cancelled: bool = False
    readers: dict[Generation, Reader] = field(default_factory=dict)


class Worker:
    """Runs the jobs of a server in an engine, which it has for itself; its methods may be called
    from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        most_jobs: int,
        max_running: int | None = None,
        seconds: float = math.inf,
    ) -> None:
        """
        Args:
            most_jobs: that wait and run at the same time; `submit` refuses more.
            max_running: see `Scheduler`.
            seconds: that a job may wait and run.
        """
        self.most_jobs = most_jobs
        self._max_running = max_running
        self._seconds = seconds
        self._engine = engine
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(engine, max_running=max_running)
        self._new: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._of: dict[Generation, Job] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quantkit-serve", daemon=True)
        self._thread.start()

    @property
    def jobs(self) -> int:
        """Return those that wait or run."""
        with self._changed:
            return len(self._new) + len(self._jobs)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of prompts that were not computed, as the cache held them."""
        return self._scheduler.num_reused_tokens

    @property
    def num_proposed_tokens(self) -> int:
        """Tokens that were proposed, of which some were wrong."""
        return self._engine.num_proposed_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Proposed tokens that were right."""
        return self._engine.num_accepted_tokens

    @property
    def alive(self) -> bool:
        """Return whether it can run jobs."""
        return self._thread.is_alive() and not self._stopping

    def submit(
        self, requests: Sequence[Request], stop: Sequence[str], deliver: Deliver
    ) -> Job | None:
        """Start the requests of one client, and hand what comes of them to `deliver`.

        Returns:
            None if there are too many jobs, or the worker is stopping.
        """
        samples = sum(request.samples for request in requests)
        job = Job(
            requests,
            stop,
            deliver,
            ends_by=time.monotonic() + self._seconds,
            num_unfinished=samples,
        )
        with self._changed:
            if not self.alive or len(self._new) + len(self._jobs) >= self.most_jobs:
                return None
            self._new.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Give up a request, with the next step; nothing more is delivered."""
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
        while True:
            with self._changed:
                while not (self._stopping or self._new or self._jobs):
                    self._changed.wait()
                if self._stopping:
                    waiting = [*self._new, *self._jobs]
                    break
                begun = [self._new.popleft() for _ in range(len(self._new))]
                self._jobs += begun
            try:
                self._step(begun)
            except Exception as error:
                # A step serves many: none of them may wait for ever.
                self._fail(error)
        for job in waiting:
            self._deliver(job, QuantkitError("the server is shutting down"))

    def _step(self, begun: Sequence[Job]) -> None:
        for job in begun:
            try:
                self._begin(job)
            except RequestError as error:
                self._give_up(job)
                self._deliver(job, error)
        for job in [one for one in self._jobs if one.cancelled]:
            self._give_up(job)
        now = time.monotonic()
        for job in [one for one in self._jobs if one.ends_by <= now]:
            self._give_up(job)
            self._deliver(
                job, TimeLimitError(f"the request took more than {self._seconds:g} seconds")
            )
        if not self._scheduler.busy:
            return
        for one in self._scheduler.step():
            if (owner := self._of.get(one)) is not None:
                try:
                    self._read(owner, one)
                except QuantkitError as error:  # of this continuation alone
                    self._give_up(owner)
                    self._deliver(owner, error)

    def _begin(self, job: Job) -> None:
        """Hand the requests of a job to the scheduler, which counts them as those of one client."""
        if job.cancelled:
            return
        share = Share()
        for number, request in enumerate(job.requests):
            for generation in self._scheduler.add(request, share):
                job.readers[generation] = Reader(number, generation, self._tokenizer, job.stop)
                self._of[generation] = job

    def _read(self, job: Job, generation: Generation) -> None:
        reader = job.readers[generation]
        before = reader.tokens
        pieces = len(reader.pieces)
        if reader.read() and generation.finish_reason is None:
            self._scheduler.end(generation)
        logprobs = None
        prompt_logprobs = None
        if generation.logprobs is not None:
            if generation.request.echo:
                echoed = len(generation.request.prompt)
            else:
                echoed = 0
            logprobs = generation.logprobs.cut(echoed + reader.tokens, start=echoed + before)
            if echoed and not before:
                prompt_logprobs = generation.logprobs.cut(echoed)
        if generation.finish_reason is not None:
            completion = reader.completion()
        else:
            completion = None
        delta = Delta(
            generation.sample,
            text="".join(reader.pieces[pieces:]),
            token_ids=generation.tokens[before : reader.tokens],
            logprobs=logprobs,
            completion=completion,
            prompt=reader.number,
            prompt_logprobs=prompt_logprobs,
        )
        self._deliver(job, delta)
        if completion is not None:
            # And so what restricts it.
            del self._of[generation], job.readers[generation]
            job.num_unfinished -= 1
            if not job.num_unfinished:
                self._end(job)

    def _give_up(self, job: Job) -> None:
        """End the continuations of a job that still run."""
        for reader in job.readers:
            if reader.finish_reason is None:
                self._scheduler.end(reader)
        self._end(job)

    def _end(self, job: Job) -> None:
        with self._changed:
            self._jobs.remove(job)
        for reader in job.readers:
            self._of.pop(reader, None)

    def _fail(self, error: Exception) -> None:
        """Report an error of a step to all whose requests were running, and begin anew."""
        if not isinstance(error, QuantkitError):
            _log.error("a step failed", exc_info=error)
        with self._changed:
            failed = self._jobs
            self._jobs = []
        self._of.clear()
        self._scheduler = Scheduler(self._engine, max_running=self._max_running)
        if isinstance(error, QuantkitError):
            shown = error
        else:
            shown = QuantkitError("internal error")
        for job in failed:
            self._deliver(job, shown)

    def _deliver(self, job: Job, event: Delta | QuantkitError) -> None:
        if not job.cancelled:
            job.deliver(event)
