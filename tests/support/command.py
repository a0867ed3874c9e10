"""Run one quantkit command in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantkit.cli.main import main

Capture = pytest.CaptureFixture[str]


PROGRESS = re.compile(
    r"^quantkit: (step \d of \d, )?(?P<phase>.+): (?P<done>\d+)/(?P<total>\d+)"
    r" (?P<unit>[A-Za-z]+)(, KL [\d.e-]+)?"
    r"(?P<left>, [\d:]+ left)?\n",
    re.M,
)


ESTIMATE = re.compile(r"^quantkit: note: this takes about memory .*\n", re.M)


def without_progress(stderr: str) -> str:
    """What stderr holds besides the plain lines of progress, and the one that tells what a
    command is about to take.
    """
    return ESTIMATE.sub("", PROGRESS.sub("", stderr))


def run(capfd: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without its progress, of one command."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    streams = capfd.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, streams.out, without_progress(streams.err)
