"""Adapters as users request them: folders with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.base.arguments import as_number, as_path, is_several
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError

Requested = str | Path | Iterable[str | Path] | Mapping[str | Path, float]
"""One adapter or several: folders, each possibly with ``=WEIGHT`` after it, or weights by
folder.
"""
# The last `=` separates the weight. A weight has no slash, so a folder whose parent's name contains
# `=` is a path.
_WITH_WEIGHT = re.compile(r"(?P<path>.+)=(?P<weight>[^=/]+)", re.DOTALL)


def parse_adapters(lora: Requested) -> list[tuple[Path, float]]:
    """Parse requested adapters into their folders and weights.

    Raises:
        RequestError: for a value of another type, a weight that is not finite, or an adapter that
            is named twice.
    """
    weighted_paths: list[tuple[Path, float]] = []
    if isinstance(lora, Mapping):
        for folder, number in lora.items():
            weighted_paths.append((as_path("lora", folder), as_number("lora", number)))
    else:
        # A string is iterable too, but is one adapter.
        requests: Iterable[object] = [lora]
        if is_several(lora) and not isinstance(lora, (str, Path)):
            requests = lora
        for request in requests:
            weighted_paths.append(_split_weight(as_path("lora", request)))
    absolute_paths = [path.absolute() for path, _ in weighted_paths]
    for path, weight in weighted_paths:
        if not math.isfinite(weight):
            raise RequestError("the weight of an adapter is not finite", path=path, found=weight)
        if absolute_paths.count(path.absolute()) > 1:
            raise RequestError(Message(Option("lora"), " names an adapter twice"), found=path)
    return weighted_paths


def spell_adapters(lora: Requested) -> tuple[str, ...]:
    """Spell requested adapters as the command line does.

    Raises `RequestError` as `parse_adapters` does.
    """
    words: list[str] = []
    for path, weight in parse_adapters(lora):
        words.append(str(path) if weight == 1 else f"{path}={weight}")
    return tuple(words)


def _split_weight(path: Path) -> tuple[Path, float]:
    """Split the weight from the path of an adapter: ``PATH=0.5``; 1 if there is none."""
    match = _WITH_WEIGHT.fullmatch(str(path))
    # The name of an existing folder may contain `=`.
    if match is None or path.exists():
        return path, 1.0
    try:
        return Path(match["path"]), float(match["weight"])
    except ValueError:
        raise RequestError(
            "the weight of an adapter is not a number",
            found=format_value(match["weight"]),
            expected="PATH=NUMBER, such as adapter=0.5",
        ) from None
