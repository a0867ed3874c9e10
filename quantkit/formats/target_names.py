"""The names of the formats in which models are written; `registry` has the formats."""

from __future__ import annotations

from typing import Literal, get_args

TargetName = Literal[
    "compressed-tensors", "int-quantized", "gptq", "awq", "mlx", "meta", "hf", "gguf"
]
"""What `registry.targets` lists, in its order; a test compares them."""

TARGET_NAMES: tuple[TargetName, ...] = get_args(TargetName)
FLOAT_TARGETS: tuple[TargetName, ...] = ("meta", "hf")
"""Those that store floats only."""
