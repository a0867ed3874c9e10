"""Which modules are meant by the names, patterns and classes in a config, matched within a time limit."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from quantkit.architectures.names import is_embedding
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, shown

BY_NAME, BY_PATTERN, BY_CLASS, NO_MATCH = range(4)
"""How closely a target matches a module."""

PATTERN_SECONDS = 2.0
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "modules_in_block_to_skip", "llm_int8_skip_modules")
_HEADS = ("lm_head", "embed_out", "output")
_MAX_PATTERN = 1000
# `regex` expands repetitions; names of modules need no more.
_MAX_REPETITIONS = 1000
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_PATTERN = "re:"


class Deadline:
    """The time by which the patterns of one file must have been matched with all modules."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._end = time.monotonic() + PATTERN_SECONDS

    def left(self) -> float:
        """The seconds that are left; raises `CheckpointError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            self.missed()
        return left

    def missed(self) -> None:
        problem = "the patterns of quantization_config take too long to match"
        raise CheckpointError(problem, path=self.path, expected=f"at most {PATTERN_SECONDS:g} s")


class Targets:
    """A list of targets; ``re:`` leads a pattern, ``Embedding`` is the class of embeddings, ``Linear`` that of all
    other modules."""

    def __init__(self, targets: Sequence[str], deadline: Deadline) -> None:
        """Raises `CheckpointError` for a pattern that is invalid in Python, or too long."""
        self._deadline = deadline
        self._names = {target for target in targets if not target.startswith(_PATTERN)}
        spelled = dict.fromkeys(target for target in targets if target.startswith(_PATTERN))
        self._patterns = [_compiled(target.removeprefix(_PATTERN), deadline) for target in spelled]

    def closeness(self, module: str) -> int:
        """`BY_NAME`, `BY_PATTERN`, `BY_CLASS` or `NO_MATCH`; raises `CheckpointError` after the deadline."""
        if module in self._names:
            return BY_NAME
        for pattern in self._patterns:
            try:
                if pattern.match(module, timeout=self._deadline.left()):
                    return BY_PATTERN
            except TimeoutError:
                self._deadline.missed()
        return BY_CLASS if ("Embedding" if is_embedding(module) else "Linear") in self._names else NO_MATCH


def _compiled(pattern: str, deadline: Deadline) -> Any:
    deadline.left()
    repeated = 1
    for counts in _COUNTS.findall(pattern):
        repeated *= max(1, *(int(count[:9] or 1) for count in counts))
    if len(pattern) > _MAX_PATTERN or repeated > _MAX_REPETITIONS:
        expected = f"at most {_MAX_PATTERN} letters and {_MAX_REPETITIONS} repetitions"
        problem = "a pattern of quantization_config is too large"
        raise CheckpointError(problem, path=deadline.path, found=shown(pattern), expected=expected)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)  # the dialect of configs; `regex` supports more
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        problem = f"a pattern of quantization_config is invalid: {error}"
        raise CheckpointError(problem, path=deadline.path, found=shown(pattern)) from error


def not_skipped(modules: Iterable[str], settings: Settings) -> list[str]:
    """The modules that settings do not leave in floats, by names or parts of them."""
    skipped = [one for key in _SKIPPED if settings.has(key) for one in settings.strings(key)]
    return [module for module in modules if not any(name in module for name in skipped)]


def is_head(module: str) -> bool:
    """Whether a module is the output head."""
    return module.rpartition(".")[2] in _HEADS


def spellings(module: str) -> list[str]:
    """A module's name as configs may spell it: with and without the prefix before the layers."""
    nested, inner = "language_model.model.", "model.language_model."
    prefixes = (("", ""), ("model.", ""), (nested, inner), ("", "model."), (inner, nested))
    return [after + module.removeprefix(before) for before, after in prefixes if module.startswith(before)]
