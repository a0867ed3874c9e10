"""Other processes: what a command takes, what a peer's script answers, and workers that stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = Path(__file__).resolve().parents[1] / "peers"
"""The scripts that run in other tools' environments."""

QUANTKIT = (sys.executable, "-m", "quantkit.cli")
"""The command line of quantkit, in this environment."""

# A process begins with the memory of the one that starts it, and counts it in its peak. So what is
# measured is started by one that is small itself.
_LAUNCHER = """
import json, os, resource, subprocess, sys, time
started = time.monotonic()
code = subprocess.run(sys.argv[2:]).returncode
seconds = time.monotonic() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([code, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024], file)
"""


@dataclass(frozen=True)
class Cost:
    """What a process took.

    Attributes:
        seconds: of the clock.
        processor: seconds of all processors.
        memory: bytes, at the peak.
    """

    seconds: float
    processor: float
    memory: int


def run_and_measure(
    command: Sequence[object], environment: Mapping[str, str] | None = None, *, code: int = 0
) -> Cost:
    """Run a command to its end, and return what it took.

    Args:
        command: the program and its arguments.
        environment: variables besides those of this process.
        code: the exit code that it must have.

    Raises:
        SystemExit: if it has another exit code, with its last lines.
    """
    words = list(map(str, command))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, str(report), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        if report.exists():
            exit_code, seconds, processor, memory = json.loads(report.read_text())
            if exit_code == code:
                return Cost(seconds, processor, memory)
    raise SystemExit(_describe_failure(words, run.stdout))


def run_peer(python: str | Path, script: str | Path, *arguments: object) -> str:
    """Run a script by the Python of another environment, and return what it prints.

    Args:
        python: the interpreter.
        script: a path, or the name of a script in `PEERS`.
        arguments: those of the script.

    Raises:
        SystemExit: if it fails, with its last lines.
    """
    command = [str(python), str(PEERS / script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(_describe_failure(command, run.stderr))
    return run.stdout


def _describe_failure(command: Sequence[str], output: str) -> str:
    return "\n".join([f"failed: {' '.join(command)}", *output.splitlines()[-5:]])


def find_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of packages; `missing` for those that are not there."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return versions


class WorkerEndedError(SystemExit):
    """A worker ended without an answer."""


class Worker:
    """A process that has loaded something and answers each line with a line."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        """Start the process.

        Args:
            command: the program and its arguments.
            name: what it is, for the error if it ends.
            environment: variables besides those of this process.
            quiet: whether what it writes to standard error is dropped.
        """
        self._name = name
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, question: str) -> str:
        """Send a line and return the answer.

        Raises:
            WorkerEndedError: if the process ends instead.
        """
        assert self._process.stdin is not None
        try:
            print(question, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._make_error() from None
        return self.read()

    def read(self) -> str:
        """Return the next line that the process says by itself.

        Raises:
            WorkerEndedError: if it ends instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._make_error()
        return line.removesuffix("\n")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _make_error(self) -> WorkerEndedError:
        self._process.communicate()
        return WorkerEndedError(f"{self._name} ended with exit code {self._process.returncode}")
