"""Measuring models: perplexity, divergence, tasks and speed, as tables, pictures and a page."""

from __future__ import annotations

import importlib
from typing import Any

from quantkit.errors import RequestError


def optional(module: str) -> Any:
    """A module of the extra ``quantkit[evals]``. Raises `RequestError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise RequestError(
            f"{error.name} is not installed", hint="pip install '.[evals]', from quantkit's folder"
        ) from error
