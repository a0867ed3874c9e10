"""Measuring models: perplexity, divergence, tasks and speed, as tables, pictures and a page."""

from __future__ import annotations

import importlib
from typing import Any

from quantkit.errors import RequestError


def optional(module: str) -> Any:
    """A module of the extra ``quantkit[evals]``; matplotlib is in ``quantkit[plot]`` too.

    Raises:
        RequestError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        extra = "plot" if error.name == "matplotlib" else "evals"
        raise RequestError(
            f"{error.name} is not installed", hint=f"pip install '.[{extra}]', from quantkit's folder"
        ) from error
