"""Where the files lie that say how a model tokenizes, is told conversations, and draws tokens."""

from __future__ import annotations

from pathlib import Path

from quantkit.formats.files.located import located


def text_folder(path: str | Path) -> Path:
    """The folder that holds a model's tokenizer, chat templates and settings of generation."""
    return located(path)
