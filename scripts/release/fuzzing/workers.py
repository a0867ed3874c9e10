"""Forked workers with a watchdog: one that dies or hangs is a finding, and another takes its
place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fuzzing.inputs import Input, Inputs
from fuzzing.trial import Bench, Outcome

MEMORY = 1 << 30
"""Address space that an input may take above the worker's start."""
_M_ARENA_MAX = -8
_PR_SET_PDEATHSIG = 1
_PHASE_BYTES = 32
_LOOK_SECONDS = 0.2


class Workers:
    """Processes that take inputs in turn: worker k of n takes each n-th."""

    def __init__(self, inputs: Inputs, folder: Path, count: int, seconds: float) -> None:
        """
        Args:
            folder: has the bases in ``bases``; each worker makes its own folder there.
            seconds: that an input may take.
        """
        self._inputs = inputs
        self._folder = folder
        self._count = count
        self._seconds = seconds
        self._running: list[_Worker] = []
        self._forked = 0

    def outcomes(self, numbers: range) -> Iterator[Outcome]:
        """What became of each input, in the order in which they end."""
        with selectors.DefaultSelector() as waiting:
            for first in range(min(self._count, len(numbers))):
                self._start(numbers[first :: self._count], waiting)
            looked = time.monotonic()
            while self._running:
                for key, _ in waiting.select(timeout=_LOOK_SECONDS):
                    worker = key.data
                    outcomes, alive = worker.receive()
                    yield from outcomes
                    if not alive:
                        waiting.unregister(worker.pipe)
                        yield from self._replace(worker, None, waiting)
                passed = time.monotonic() - looked
                if passed < _LOOK_SECONDS:
                    continue
                looked += passed
                for worker in list(self._running):
                    if worker.taken(passed) > self._seconds:
                        waiting.unregister(worker.pipe)
                        os.kill(worker.process, signal.SIGKILL)
                        yield from self._replace(
                            worker, f"no end after {self._seconds:g} s", waiting
                        )

    def stop(self) -> None:
        """Kill what still runs."""
        for worker in self._running:
            os.kill(worker.process, signal.SIGKILL)
            os.waitpid(worker.process, 0)
        self._running.clear()

    def _start(self, numbers: range, waiting: selectors.BaseSelector) -> None:
        folder = self._folder / f"worker-{self._forked}"
        self._forked += 1
        worker = _Worker(self._inputs, numbers, folder, self._folder / "bases")
        self._running.append(worker)
        waiting.register(worker.pipe, selectors.EVENT_READ, worker)

    def _replace(
        self, worker: _Worker, problem: str | None, waiting: selectors.BaseSelector
    ) -> Iterator[Outcome]:
        """Remove a dead worker; if it had inputs left, report the one it died of and start
        another.
        """
        self._running.remove(worker)
        status = os.waitpid(worker.process, 0)[1]
        os.close(worker.pipe)
        if worker.left:
            if problem is None:
                how = (
                    signal.Signals(os.WTERMSIG(status)).name
                    if os.WIFSIGNALED(status)
                    else f"status {status}"
                )
                problem = f"the process died of {how}"
            trial = self._inputs.make(worker.left[0])
            finding = f"{problem} while {worker.phase()}"
            yield Outcome(trial.number, trial.kind, trial.job, {}, None, [finding])
            if worker.left[1:]:
                shutil.rmtree(worker.folder, ignore_errors=True)
                self._start(worker.left[1:], waiting)


class _Worker:
    """One forked process, and the inputs that it has not reported yet."""

    def __init__(self, inputs: Inputs, numbers: range, folder: Path, bases: Path) -> None:
        self.left = numbers
        self.folder = folder
        self._taken = 0.0
        self._ticks = 0
        self._buffer = b""
        self._phase = mmap.mmap(-1, _PHASE_BYTES)
        self.pipe, writer = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(self.pipe)
            _work(inputs, numbers, folder, bases, writer, self._phase)
        os.close(writer)

    def receive(self) -> tuple[list[Outcome], bool]:
        """What has come through the pipe, and whether more can."""
        piece = os.read(self.pipe, 1 << 16)
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        if lines:
            self._taken = 0.0
            self.left = self.left[len(lines) :]
        return [Outcome(**json.loads(line)) for line in lines], bool(piece)

    def taken(self, passed: float) -> float:
        """Seconds that the input under way has taken so far, of which some have passed since the
        last call.

        Where a thread could run, but other processes of the machine had the processor, only its own
        time counts.
        """
        process = Path(f"/proc/{self.process}")
        ticks = sum(map(int, _stat(process)[11:13]))
        own, self._ticks = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK"), ticks
        could_run = False
        for task in process.glob("task/*"):
            # A thread that has ended.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                could_run |= _stat(task)[0] == "R"
        self._taken += min(passed, own) if could_run else passed
        return self._taken

    def phase(self) -> str:
        return self._phase[:].rstrip(b"\0").decode()


def _work(
    inputs: Inputs, numbers: range, folder: Path, bases: Path, pipe: int, phase: mmap.mmap
) -> None:
    """The life of a worker."""
    status = 1
    complaints = os.dup(2)
    try:
        torch.set_num_threads(1)
        bench = prepared(folder, bases)
        for number in numbers:
            outcome = bench.run(inputs.make(number), lambda text: _write(phase, text))
            os.write(pipe, json.dumps(asdict(outcome)).encode() + b"\n")
        status = 0
    except BaseException:  # a fault of the fuzzer itself, not of what it tries
        os.write(complaints, traceback.format_exc().encode())
    finally:
        os._exit(status)


def prepared(folder: Path, bases: Path) -> Bench:
    """A bench in a process whose memory is bounded from now on, and which does not outlive its
    parent.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 2)  # the address space of an arena is no memory in use
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdin.close()
    return Bench(folder, bases)


def describe(trial: Input) -> list[str]:
    """What an input is, for people."""
    return [
        f"input {trial.number}: base {trial.base}, {trial.job}",
        *(f"  {what}" for what in trial.mutations),
    ]


def _stat(process: Path) -> list[str]:
    """The fields of a process or thread in Linux's /proc, its state first."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _write(phase: mmap.mmap, text: bytes) -> None:
    phase[:] = text[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
