"""Find the modules that the names, patterns and classes in a config mean."""

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
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        # Repeated patterns would be compared with each module several times.
        for target in dict.fromkeys(targets):
            if target.startswith(_PATTERN):
                pattern = target.removeprefix(_PATTERN)
                self._patterns.append(Pattern(pattern, key=key, match_time=match_time))
            else:
                self._names.add(target)

    def closeness(self, module: str) -> int:
        """Compare a module with the targets: `BY_NAME`, `BY_PATTERN`, `BY_CLASS` or `NO_MATCH`;
        raises `CheckpointError` as `Pattern.match` does.
        """
        # A lookup of the name comes first: patterns are slow.
        if module in self._names:
            return BY_NAME
        if any(pattern.match(module) for pattern in self._patterns):
            return BY_PATTERN
        class_name = "Embedding" if is_embedding(module) else "Linear"
        if class_name in self._names:
            return BY_CLASS
        return NO_MATCH


def select_unskipped(modules: Iterable[str], settings: Settings) -> list[str]:
    """Select the modules that settings do not leave in floats, by names or parts of them."""
    skipped: list[str] = []
    # Each method has a key of its own.
    for key in _SKIPPED:
        if settings.has(key):
            skipped += settings.strings(key)
    result: list[str] = []
    for module in modules:
        if not any(name in module for name in skipped):
            result.append(module)
    return result


def name_in_layers(module: str) -> str:
    """Shorten the name of a module to its part from the layers on; all of it outside of them."""
    start = module.rfind("layers.", 0, module.rfind("."))
    if start < 0:
        return module
    return module[start:]


def is_head(module: str) -> bool:
    """Return whether a module is the output head."""
    return module.rpartition(".")[2] in _HEADS


def spellings(module: str) -> list[str]:
    """List the spellings of a module's name in configs: with and without the prefix before the
    layers.
    """
    # Multimodal models name their language model in either order.
    nested = "language_model.model."
    inner = "model.language_model."
    prefixes = (("", ""), ("model.", ""), (nested, inner), ("", "model."), (inner, nested))
    result: list[str] = []
    for before, after in prefixes:
        if module.startswith(before):
            result.append(after + module.removeprefix(before))
    return result
