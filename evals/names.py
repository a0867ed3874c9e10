"""Names of models in tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest ends of paths that are distinct: ``int4``, or ``a/int4`` where there is a ``b/int4`` too."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    return [_end(own, {other for other in parts if other != own}) for own in parts]


def _end(own: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    for count in range(1, len(own)):
        if not any(other[-count:] == own[-count:] for other in others):
            return "/".join(own[-count:])
    return str(Path(*own))


def named(texts: Sequence[str | Path]) -> list[tuple[str | None, Path]]:
    """Paths with their names in ``NAME=PATH``; None for a path that exists under the whole string."""
    return [_named(str(text)) for text in texts]


def _named(text: str) -> tuple[str | None, Path]:
    name, _, path = text.partition("=")
    if not name.strip() or not path or "/" in name or os.path.lexists(text):
        return None, Path(text)
    return name.strip(), Path(path)
