"""What the plots of `eval` and `bench` share: figures of matplotlib, an optional package."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.evals.extras import optional


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches.

    Raises:
        RequestError: if matplotlib is not installed.
    """
    return optional("matplotlib.figure").Figure(figsize=(width, height), dpi=150, layout="constrained")


def picture_bytes(figure: Any, kind: str) -> bytes:
    """The figure as a file: ``png``, ``pdf`` or ``svg``."""
    out = io.BytesIO()
    with ignore_missing_glyphs():
        figure.savefig(out, format=kind)
    return out.getvalue()


def style_axes(axes: Any, grid: str) -> None:
    """A light grid along ``x``, ``y`` or ``both``, and no frame at the top and the right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """No warnings for names in scripts that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield
