"""Which modules are meant by the names, patterns and classes in a config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantkit.architectures.names import is_embedding
from quantkit.base.json_values import Settings
from quantkit.base.patterns import MatchTime, Pattern

BY_NAME, BY_PATTERN, BY_CLASS, NO_MATCH = range(4)
"""How closely a target matches a module."""

_SKIPPED = (
    "modules_to_not_convert",
    "ignored_layers",
    "modules_in_block_to_skip",
    "llm_int8_skip_modules",
)
_HEADS = ("lm_head", "embed_out", "output")
_PATTERN = "re:"


class Targets:
    """A list of targets; ``re:`` leads a pattern, ``Embedding`` is the class of embeddings,
    ``Linear`` that of all other modules.
    """

    def __init__(self, targets: Sequence[str], *, key: str, match_time: MatchTime) -> None:
        """Compile the patterns of a list, which is the value of `key`; raises `CheckpointError`
        as `Pattern` does.
        """
        self._names = {target for target in targets if not target.startswith(_PATTERN)}
        spelled = dict.fromkeys(target for target in targets if target.startswith(_PATTERN))
        self._patterns = [
            Pattern(target.removeprefix(_PATTERN), key=key, match_time=match_time)
            for target in spelled
        ]

    def closeness(self, module: str) -> int:
        """`BY_NAME`, `BY_PATTERN`, `BY_CLASS` or `NO_MATCH`; raises `CheckpointError` as
        `Pattern.match` does.
        """
        if module in self._names:
            return BY_NAME
        if any(pattern.match(module) for pattern in self._patterns):
            return BY_PATTERN
        if ("Embedding" if is_embedding(module) else "Linear") in self._names:
            return BY_CLASS
        return NO_MATCH


def not_skipped(modules: Iterable[str], settings: Settings) -> list[str]:
    """Return the modules that settings do not leave in floats, by names or parts of them."""
    skipped = []
    for key in _SKIPPED:
        if settings.has(key):
            for string in settings.strings(key):
                skipped.append(string)
    result: list[str] = []
    for module in modules:
        if not any(name in module for name in skipped):
            result.append(module)
    return result


def is_head(module: str) -> bool:
    """Return whether a module is the output head."""
    return module.rpartition(".")[2] in _HEADS


def spellings(module: str) -> list[str]:
    """Return a module's name as configs may spell it: with and without the prefix before the
    layers.
    """
    nested = "language_model.model."
    inner = "model.language_model."
    prefixes = (("", ""), ("model.", ""), (nested, inner), ("", "model."), (inner, nested))
    result: list[str] = []
    for before, after in prefixes:
        if module.startswith(before):
            result.append(after + module.removeprefix(before))
    return result
