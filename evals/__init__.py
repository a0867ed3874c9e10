"""Measuring models: perplexity, divergence, tasks and speed, as tables, pictures and a page."""

from __future__ import annotations

import importlib
from typing import Any

from quantkit.errors import RequestError


def optional(module: str) -> Any:
    """Import a module of the extra ``quantkit[evals]``; matplotlib is in ``quantkit[plot]`` too.

    Raises:
        RequestError: if it is not installed, or cannot be imported.
    """
    package = module.partition(".")[0]
    try:
        # The package comes first, so that the error names it if it is absent, not the submodule.
        importlib.import_module(package)
        return importlib.import_module(module)
    # A damaged package can raise any type.
    except Exception as error:
        # A missing dependency of the package is an error of another name: the package itself is
        # installed, but cannot be imported.
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
