"""Models that stay loaded, each in a process, and are measured in turn: ours and llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence

from shared.processes import Worker

LLAMA_TYPES = {"int8": "Q8_0", "int4-g32": "Q4_0", "int4-g128": "Q4_0"}
"""The type of llama.cpp that is measured next to a scheme."""


class Candidate:
    """A process that has loaded a model and measures on request."""

    def __init__(self, command: Sequence[object]) -> None:
        self._worker = Worker(command, name="a candidate")
        self.weight_bytes = int(self._worker.read())

    def measure(self, request: str) -> float:
        """Return what the process measures, tokens a second."""
        return float(self._worker.ask(request))

    def end(self) -> None:
        """End the process."""
        self._worker.end()
