"""Regular expressions that come from files, matched within a time limit.

`re` cannot be interrupted, and takes exponential time for patterns such as ``(a*)*b``. The `regex`
package has timeouts. Patterns that it reads differently from `re` are refused.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import regex  # type: ignore[import-untyped]

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError

MAX_SECONDS = 2.0
"""What all patterns of one file may take to match, together."""
# Some trainers write all module names into one pattern of a few thousand letters.
_MAX_LENGTH = 10_000
# `regex` expands counted repetitions when it compiles a pattern.
_MAX_REPETITIONS = 1000
# Of groups; `re` recurses for each, and libraries may change the limit of Python's stack.
_MAX_DEPTH = 100
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")
# Repetitions and alternatives, between which a match backtracks.
_BRANCHES = re.compile(r"[*+?{|]")
_READ_DIFFERENTLY = re.compile(
    # `[[:alpha:]]`: a class of POSIX.
    r"\[\^?\]?(?:\\.|[^]\\])*\[:"
    # `x{e<=1}`: an approximate match.
    r"|(?<!\\)(?<!\\N)\{[^}]*[deis][^}]*\}"
)


class MatchTime:
    """The time that is left for the patterns of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seconds = MAX_SECONDS

    @contextmanager
    def spend(self, key: str) -> Iterator[float]:
        """Run a block that compiles or matches a pattern, and count its time; yields the seconds
        that it may take.

        Raises:
            CheckpointError: if no time is left, or the block ends with a `TimeoutError`; with the
                file and the key.
        """
        if self._seconds <= 0:
            raise self._error(key)
        start = time.perf_counter()
        try:
            yield self._seconds
        except TimeoutError:
            raise self._error(key) from None
        finally:
            self._seconds -= time.perf_counter() - start

    def _error(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"the patterns of {key} take too long to match",
            path=self.path,
            expected=f"at most {MAX_SECONDS:g} s",
            hint="write patterns without repetitions inside repetitions",
        )


class Pattern:
    """A regular expression of a file, in the dialect of `re`."""

    def __init__(
        self,
        expression: str,
        *,
        key: str,
        match_time: MatchTime,
        prefix: str = "",
        suffix: str = "",
    ) -> None:
        """Compile a pattern.

        Args:
            key: the key of the file that holds the expression, for errors.
            match_time: of all patterns of the file.
            prefix, suffix: what the reader of the file adds to the expression.

        Raises:
            CheckpointError: if the pattern is too large, invalid in `re`, or means something else
                in `regex`.
        """
        self._key = key
        self._match_time = match_time
        full_expression = f"{prefix}{expression}{suffix}"
        _require_moderate_size(expression, key=key, path=match_time.path)
        # Without repetitions and alternatives, `re` takes linear time, and an eighth of what
        # `regex` takes. Adapters may have a name for each module, which are compared with the names
        # of all modules.
        self._is_fast = _BRANCHES.search(expression) is None
        try:
            with match_time.spend(key), warnings.catch_warnings():
                # Of syntax that will change; whoever runs the job did not write the pattern.
                warnings.simplefilter("ignore")
                # Also if `regex` matches it: a pattern that is invalid in `re` is refused.
                self._pattern: Any = re.compile(full_expression)
                if not self._is_fast:
                    self._pattern = regex.compile(full_expression)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            problem = f"a pattern of {key} is invalid: {error}"
            raise CheckpointError(
                problem, path=match_time.path, found=format_value(expression)
            ) from error
        if not self._is_fast and _READ_DIFFERENTLY.search(expression):
            raise CheckpointError(
                f"a pattern of {key} is not supported",
                path=match_time.path,
                found=format_value(expression),
                expected="no POSIX classes and no letters in braces",
            )

    def match(self, text: str) -> Any:
        """Match the beginning of a string, as `re.match` does; raises `CheckpointError` if no
        time is left.
        """
        return self._run(self._pattern.match, text)

    def fullmatch(self, text: str) -> Any:
        """Match a whole string, as `re.fullmatch` does; raises as `match`."""
        return self._run(self._pattern.fullmatch, text)

    def _run(self, match: Any, text: str) -> Any:
        if self._is_fast:
            return match(text)
        with self._match_time.spend(self._key) as seconds:
            return match(text, timeout=seconds)


def _require_moderate_size(expression: str, *, key: str, path: str) -> None:
    # The product: nested repetitions multiply when `regex` expands them.
    repetitions = 1
    for minimum, maximum in _COUNTS.findall(expression):
        # Nine digits exceed the limit already, and keep the product cheap.
        repetitions *= max(1, int(minimum[:9] or 1), int(maximum[:9] or 1))
    depth = 0
    deepest = 0
    # Escaped parentheses count too, which only makes the limit stricter.
    for letter in expression:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        deepest = max(deepest, depth)
    if len(expression) > _MAX_LENGTH or repetitions > _MAX_REPETITIONS or deepest > _MAX_DEPTH:
        raise CheckpointError(
            f"a pattern of {key} is too large",
            path=path,
            found=format_value(expression),
            expected=(
                f"at most {_MAX_LENGTH} characters, {_MAX_REPETITIONS} repetitions and {_MAX_DEPTH}"
                " nested groups"
            ),
        )
