"""Define the errors users see: one line each, with a stable exit code per kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Self

from quantkit.base.messages import Message, Option

# For temporary files that are made from a file of the user, who does not know their names.
_sources: dict[Path, Path] = {}


def name_as(temporary_path: Path, source: Path) -> None:
    """Let errors about a temporary folder, or a file in it, name the file that it was made from."""
    _sources[temporary_path] = source


class QuantkitError(Exception):
    """An error that the user can act on, in one line.

    The line, ``str(error)``, reads ``path: problem (found ..., expected ...); hint``; parts that
    are None are left out.

    Attributes:
        exit_code: the exit code of a command that ends with it; the same for all errors of a kind.
        retryable: whether the same call may succeed later; a job that writes needs `resume=True`
            for that.
        problem: what is wrong.
        path: the file or folder that it concerns.
        found, expected: the value that was found or requested, and the values that are possible.
        hint: what to do next.
        argument: the name of the argument, or of the field of a request, that is wrong.
        message: the line, in which options are data that a front end spells.
    """

    exit_code = 1
    retryable = False

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        argument: str | None = None,
    ) -> None:
        self.problem = problem
        if path is None:
            self.path = None
        else:
            self.path = _to_source_path(Path(path))
        self.found = found
        self.expected = expected
        self.hint = hint
        self.argument = argument
        parts: list[str | Option] = [problem]
        if self.path is not None:
            parts.insert(0, f"{self.path}: ")
        facts: list[str | Option] = []
        for label, value in (("found", found), ("expected", expected)):
            if value is None:
                continue
            if facts:
                facts.append(", ")
            facts.append(f"{label} ")
            # Messages and options stay as they are, so that a front end can spell the options.
            if isinstance(value, (str, Option)):
                facts.append(value)
            else:
                facts.append(str(value))
        if facts:
            parts += [" (", *facts, ")"]
        if hint:
            parts += ["; ", hint]
        self.message = Message(*parts).join_lines()
        super().__init__(self.message)

    def restate(self, **changes: Any) -> Self:
        """Copy the error with some of its parts changed, by the names of the attributes."""
        names = ("problem", "path", "found", "expected", "hint", "argument")
        parts = {name: getattr(self, name) for name in names}
        # The constructors of some kinds take other arguments; a copy keeps their attributes.
        restated = copy.copy(self)
        QuantkitError.__init__(restated, **(parts | changes))
        return restated


def _to_source_path(path: Path) -> Path:
    for folder in (path, *path.parents):
        if folder in _sources:
            return _sources[folder] / path.relative_to(folder)
    return path


class RequestError(QuantkitError):
    """The request is not valid: a bad scheme, pattern, prompt or option."""

    exit_code = 2


class UnreachableError(RequestError):
    """The hub, or a server, does not answer, at least not now."""

    retryable = True


class CheckpointError(QuantkitError):
    """The source is damaged, incomplete or contradicts itself."""

    exit_code = 3


class UnsupportedError(QuantkitError):
    """The source is sound, but quantkit cannot convert it without changing its meaning."""

    exit_code = 4


class UnreadLayoutError(UnsupportedError):
    """Weights are stored in a layout that is not read, whatever the architecture: no other way
    to open them helps.
    """


class NotRepresentableError(UnsupportedError):
    """A format cannot hold the codes, scales or zero points of a quantized tensor exactly.

    Attributes:
        by_scales: whether the scales are the reason; a cast to another float type may help.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        by_scales: bool = False,
    ) -> None:
        super().__init__(problem, path=path, found=found, expected=expected, hint=hint)
        self.by_scales = by_scales


class DestinationError(QuantkitError):
    """The destination exists, cannot be written, or has too little space."""

    exit_code = 5


class NoSpaceError(DestinationError):
    """The disk is full, or has less space than the output takes."""

    retryable = True


class ResumeError(QuantkitError):
    """The destination holds an interrupted run, which this one cannot or may not continue."""

    exit_code = 6


class InterruptedRunError(ResumeError):
    """The destination holds an interrupted run: `resume=True` continues it."""


class BeingWrittenError(ResumeError):
    """Another job is writing to the destination, in this process or another one."""

    retryable = True


class NonFiniteError(QuantkitError):
    """Weights or logits hold NaN or Inf."""

    exit_code = 7


class QualityError(QuantkitError):
    """The result is complete, but differs from its source by more than the scheme's bound."""

    exit_code = 8


class NoImprovementError(QualityError):
    """Training did not bring a quantized model closer to its float model."""


class GroupError(QuantkitError):
    """The processes of one job were started with different arguments, or one of them died."""

    exit_code = 9
