"""Codes as files store them."""

from __future__ import annotations

from pathlib import Path

from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.tensors.qtensor import QuantTensor


def codes(folder: Path) -> dict[str, QuantTensor]:
    checkpoint = open_checkpoint(folder)
    loaded = {module: checkpoint.load(module + ".weight") for module in schemes(checkpoint)}
    return {module: value for module, value in loaded.items() if isinstance(value, QuantTensor)}
