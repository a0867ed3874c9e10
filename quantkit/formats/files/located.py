"""Where a model is that somebody names."""

from __future__ import annotations

from pathlib import Path


def located(path: str | Path) -> Path:
    """The folder or file of a model, on this machine."""
    return Path(path)
