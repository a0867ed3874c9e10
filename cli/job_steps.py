"""The steps of a job: which one runs, and the time left of all, from their estimates and the
time taken so far.
"""

from __future__ import annotations

from collections.abc import Mapping

_RATE_KNOWN = 0.2
"""The share of a step after which only its own rate counts for the rest of it."""
_TRUST = 0.25
"""The share of the estimated time after which steps count as much as the estimate for how fast
the machine is.
"""


class JobSteps:
    """A job's steps, in order, with the seconds that each was estimated to take.

    A phase that is not one of them, such as the part of an interrupted run that is passed through
    again, counts as far as its own rate shows.
    """

    def __init__(self, seconds: Mapping[str, float], now: float) -> None:
        self._seconds = dict(seconds)
        self._names = list(seconds)
        self._began = self._step_began = self._changed = now
        self._current: str | None = None
        # The share of the current phase that was done at its first report: a resumed run begins in
        # the middle of a phase.
        self._first = self._done = self._shown = 0.0
        self._measured_seconds: dict[str, float] = {}

    def report(self, phase: str, share: float, now: float) -> None:
        """Record that a share of a phase is done."""
        if phase != self._current:
            if self._current is not None:
                self._measured_seconds[self._current] = now - self._step_began
            self._current = phase
            self._first = share
            self._done = share
            self._step_began = self._changed = now
        elif share > self._done:
            # A phase that begins again, in another round, does not go back.
            self._done = share
            self._changed = now

    def label(self, phase: str) -> str:
        """Add the number of the step to the name of a phase, if it is a step."""
        if phase not in self._seconds:
            return phase
        return f"step {self._names.index(phase) + 1} of {len(self._names)}, {phase}"

    def estimate_remaining_seconds(self, now: float) -> float:
        """Estimate the seconds left of the whole job."""
        elapsed = now - self._step_began
        pace = self._pace(elapsed)
        estimated = pace * self._seconds.get(self._current or "", 0.0) * (1 - self._first)
        progressed = self._done - self._first
        total = 1 - self._first
        # The first rate of a phase is noisy, so the estimate counts until more of it is done.
        if progressed > 0 and total > 0:
            share = progressed / total
            observed = (self._changed - self._step_began) / share
            trust = min(1.0, share / _RATE_KNOWN)
            estimated = trust * observed + (1 - trust) * estimated
        if self._done >= 1:
            current_seconds = 0.0
        else:
            current_seconds = max(estimated - elapsed, 0.0)
        later_seconds = sum(self._seconds[name] for name in self._later())
        return current_seconds + pace * later_seconds

    def share(self, now: float) -> float:
        """Estimate the share of the job's time that has passed; it never goes back, and the end is
        left to the job.
        """
        passed = now - self._began
        total = passed + self.estimate_remaining_seconds(now)
        if total:
            share = passed / total
        else:
            share = 0.0
        # The job is not done while it still reports, even if no time is estimated to be left.
        self._shown = max(self._shown, min(share, 0.99))
        return self._shown

    def _later(self) -> list[str]:
        """List the steps after the furthest one that has begun."""
        # An interrupted run that continues may skip steps, and the current phase may be no step.
        reached = []
        for name in (*self._measured_seconds, self._current):
            if name in self._seconds:
                reached.append(self._names.index(name))
        return self._names[max(reached, default=-1) + 1 :]

    def _pace(self, elapsed: float) -> float:
        """Measure the time that work takes, in units of its estimate, by the steps that are done;
        and by the current one, once it takes longer than estimated.
        """
        measured_names = [name for name in self._measured_seconds if name in self._seconds]
        measured = sum(self._measured_seconds[name] for name in measured_names)
        estimated = sum(self._seconds[name] for name in measured_names)
        current = self._seconds.get(self._current or "", 0.0)
        if elapsed > current > 0:
            measured += elapsed
            estimated += current
        # A share of the whole estimate counts as work at the estimated pace, so a short first step
        # does not decide alone.
        prior = _TRUST * sum(self._seconds.values())
        if estimated + prior:
            return (measured + prior) / (estimated + prior)
        return 1.0
