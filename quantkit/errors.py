"""The errors users see: one line each, with a stable exit code per kind."""

from __future__ import annotations

from pathlib import Path


class QuantkitError(Exception):
    """Something the user can act on, told in one line.

    The line reads ``path: problem (found ..., expected ...); hint``; parts that
    were not given are left out.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = None if path is None else Path(path)
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self._line())

    def _line(self) -> str:
        line = self.problem if self.path is None else f"{self.path}: {self.problem}"
        facts = [
            f"{label} {value}"
            for label, value in (("found", self.found), ("expected", self.expected))
            if value is not None
        ]
        if facts:
            line += f" ({', '.join(facts)})"
        if self.hint:
            line += f"; {self.hint}"
        return " ".join(line.split())


class RequestError(QuantkitError):
    """The request itself makes no sense: a bad scheme, pattern, prompt or option."""

    exit_code = 2


class CheckpointError(QuantkitError):
    """The source is damaged, incomplete or contradicts itself."""

    exit_code = 3


class UnsupportedError(QuantkitError):
    """The source is sound, but quantkit cannot carry it without changing its meaning."""

    exit_code = 4


class DestinationError(QuantkitError):
    """The destination exists, cannot be written, or has too little space."""

    exit_code = 5


class ResumeError(QuantkitError):
    """An interrupted run is there, and this one cannot or may not continue it."""

    exit_code = 6


class NonFiniteError(QuantkitError):
    """Weights or logits hold NaN or Inf."""

    exit_code = 7


class QualityError(QuantkitError):
    """The result is sound, but further from its source than the scheme's bound allows."""

    exit_code = 8


class GroupError(QuantkitError):
    """The processes of one job were started differently, or one of them was lost."""

    exit_code = 9
