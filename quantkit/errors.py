"""The errors users see: one line each, with a stable exit code per kind."""

from __future__ import annotations

from pathlib import Path

_sources: dict[Path, Path] = {}


def name_as(made: Path, source: Path) -> None:
    """Have errors that concern a folder made for the time being, or a file in it, name what it was made of."""
    _sources[made] = source


class QuantkitError(Exception):
    """Something the user can act on, told in one line.

    The line, ``str(error)``, reads ``path: problem (found ..., expected ...); hint``; parts that
    were not given are left out.

    Attributes:
        exit_code: of a command that ends by it; the same for all errors of a kind.
        retryable: whether the same call may succeed later; of a job that writes, with `resume=True`.
        problem: what is wrong.
        path: the file or folder that it concerns; None where there is none.
        found, expected: what was there or was asked for, and what there could be; None where that says nothing.
        hint: what to do next; None where there is nothing to say.
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
    ) -> None:
        """
        Args:
            problem, path, found, expected, hint: see the attributes; what is given is told in the line.
        """
        self.problem = problem
        self.path = None if path is None else _named(Path(path))
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


def _named(path: Path) -> Path:
    made = next((one for one in (path, *path.parents) if one in _sources), None)
    return path if made is None else _sources[made] / path.relative_to(made)


class RequestError(QuantkitError):
    """The request itself makes no sense: a bad scheme, pattern, prompt or option."""

    exit_code = 2


class UnreachableError(RequestError):
    """The hub does not answer, or not now."""

    retryable = True


class CheckpointError(QuantkitError):
    """The source is damaged, incomplete or contradicts itself."""

    exit_code = 3


class UnsupportedError(QuantkitError):
    """The source is sound, but quantkit cannot carry it without changing its meaning."""

    exit_code = 4


class NotRepresentableError(UnsupportedError):
    """A format has no codes, scales or zero points that are exactly those of a quantized tensor.

    Attributes:
        by_scales: whether scales do not fit, which a cast to another float type may mend.
    """

    def __init__(
        self, problem: str, *, path: str | Path | None = None, found: object = None, expected: object = None,
        hint: str | None = None, by_scales: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(problem, path=path, found=found, expected=expected, hint=hint)
        self.by_scales = by_scales


class DestinationError(QuantkitError):
    """The destination exists, cannot be written, or has too little space."""

    exit_code = 5


class NoSpaceError(DestinationError):
    """The disk is full, or has less space than the output takes."""

    retryable = True


class ResumeError(QuantkitError):
    """An interrupted run is there, and this one cannot or may not continue it."""

    exit_code = 6


class InterruptedRunError(ResumeError):
    """An interrupted run is there: `resume=True` goes on with it."""


class BeingWrittenError(ResumeError):
    """A job that runs is writing there, in this process or another one."""

    retryable = True


class NonFiniteError(QuantkitError):
    """Weights or logits hold NaN or Inf."""

    exit_code = 7


class QualityError(QuantkitError):
    """The result is sound, but further from its source than the scheme's bound allows."""

    exit_code = 8


class GroupError(QuantkitError):
    """The processes of one job were started differently, or one of them was lost."""

    exit_code = 9
