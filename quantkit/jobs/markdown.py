"""Markdown of the model card: paragraphs and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 120


def wrapped(text: str) -> list[str]:
    """A paragraph in lines that editors show whole."""
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
