"""Names of dtypes on the command line."""

from __future__ import annotations

from typing import Any


def float_type(name: str | None) -> Any:
    """The torch type of a ``--dtype``; None is the model's own."""
    from quantkit.formats.checkpoint import FLOAT_DTYPES
    from quantkit.jobs.convert import DTYPES

    return None if name is None else FLOAT_DTYPES[DTYPES[name]]
