"""A server in a process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
KEY = "a key of sixteen letters"


@contextmanager
def started(model: Path, *options: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address without the version."""
    given = ["serve", model, "--port", "0", "--backend", "cpu-exact", *options]
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        *map(str, given),
    ]  # signals are for this very process
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+)/v1; Ctrl-C ends it", line)
        assert found is not None, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()
