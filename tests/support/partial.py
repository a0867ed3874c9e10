"""Interrupted runs: how tests leave one behind, look at it and change it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration.effort import GRADIENTS
from quantkit.calibration.importance import IMPORTANCE
from quantkit.formats.output.destination import JOURNAL, OwnFolder
from quantkit.formats.output.journal import Journal

LONGEST = 300
STOPPED_TRAINING = """
import os, signal
import quantkit.training.state as state
saved = state.SavedTraining.save_after_evaluation
def once(self, found):
    saved(self, found)
    if len(found.curve) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
state.SavedTraining.save_after_evaluation = once
"""
"""Before `forked.COMMAND`: kills the process once a training has saved its first epoch."""
Change = Callable[[dict[str, Any]], Any]


@contextmanager
def no_hang() -> Iterator[None]:
    """What waits for ever fails instead."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still busy after {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def partial(dst: Path) -> Path:
    return dst.with_name(dst.name + ".partial")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted(job: Callable[..., Any], src: Path, dst: Path, share: float = 0.6) -> Path:
    """Run a job until a share of its output is written, and stop it as Ctrl-C does; the partial
    folder.
    """

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if phase not in (IMPORTANCE, GRADIENTS) and share * total <= done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(src, dst, source_check=False, progress=progress)
    assert not dst.exists()
    return partial(dst)


def rewrite_last(folder: Path, change: Change) -> None:
    """Change what the journal says last, and seal it as quantkit does."""
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[-1])
    del entry["check"]
    (folder / JOURNAL).write_bytes(b"".join(lines[:-1]))
    changed = change(entry)
    held = OwnFolder(folder)
    journal = Journal(held)
    journal.append(entry if changed is None else changed)
    journal.close()
    held.close()
