"""Measuring models: perplexity, divergence, tasks and speed, as tables, pictures and a page."""

from __future__ import annotations

import importlib
from typing import Any

from quantkit.errors import RequestError


def optional(module: str) -> Any:
    """Return a module of the extra ``quantkit[evals]``; matplotlib is in ``quantkit[plot]`` too.

    Raises:
        RequestError: if it is not installed, or cannot be imported.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except Exception as error:  # of any type, from a damaged package
        if not isinstance(error, ModuleNotFoundError) or error.name != package:
            raise RequestError(
                f"{package} cannot be imported", found=f"{type(error).__name__}: {error}"
            ) from error
        if package == "matplotlib":
            extra = "plot"
        else:
            extra = "evals"
        raise RequestError(
            f"{package} is not installed", hint=f"pip install '.[{extra}]', from quantkit's folder"
        ) from error
