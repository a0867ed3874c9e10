"""Run one quantkit command in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.cli.main import main

Capture = pytest.CaptureFixture[str]


def run(capfd: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    streams = capfd.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, streams.out, streams.err
