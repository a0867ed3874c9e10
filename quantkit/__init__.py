"""quantkit: convert, quantize, verify and run Llama-family language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit.formats.detect import open_checkpoint
    from quantkit.jobs.convert import convert
    from quantkit.jobs.inspect import inspect
    from quantkit.jobs.load import load
    from quantkit.jobs.quantize import quantize
    from quantkit.quality.verify import verify
    from quantkit.runtime.generate import generate

_HOMES = {
    "convert": "quantkit.jobs.convert",
    "generate": "quantkit.runtime.generate",
    "inspect": "quantkit.jobs.inspect",
    "load": "quantkit.jobs.load",
    "open_checkpoint": "quantkit.formats.detect",
    "quantize": "quantkit.jobs.quantize",
    "verify": "quantkit.quality.verify",
}

__all__ = ["__version__", "convert", "generate", "inspect", "load", "open_checkpoint", "quantize", "verify"]


def __getattr__(name: str) -> Any:
    """Import torch only when something is used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
