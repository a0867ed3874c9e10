"""How a layer's codes are found: by rounding alone, or by GPTQ on calibration text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantkit.calibration.data import Calibration
from quantkit.calibration.pipeline import BlockQuantizer, Result
from quantkit.formats.checkpoint import Checkpoint
from quantkit.qtensor import QuantTensor, quantize_rtn
from quantkit.scheme import QuantScheme

LayerSolver = Callable[[str, Tensor, QuantScheme, torch.dtype], tuple[QuantTensor, dict[str, object]]]
"""Tensor name, weight, scheme and dtype of the scales, to codes and what the manifest says of them."""


def solve_rtn(
    name: str, weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> tuple[QuantTensor, dict[str, object]]:
    """Round to nearest."""
    return quantize_rtn(weight, scheme, scale_dtype), {"solver": "round-to-nearest"}


class GptqSolver:
    """GPTQ for the layers of decoder blocks, asked for in their order; rounding for others."""

    def __init__(self, source: Checkpoint, calibration: Calibration, schemes: Mapping[str, QuantScheme]) -> None:
        self._source = source
        self._calibration = calibration
        self._schemes = schemes
        self._blocks: BlockQuantizer | None = None
        self._ready: dict[str, Result] = {}

    def __call__(
        self, name: str, weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> tuple[QuantTensor, dict[str, object]]:
        """One layer's codes. The first of a block solves the block, and those before it if need be."""
        if not name.startswith("model.layers."):
            return solve_rtn(name, weight, scheme, scale_dtype)
        if self._blocks is None:
            self._blocks = BlockQuantizer(self._source, self._calibration.tokens, self._schemes, scale_dtype)
        while name not in self._ready:
            self._ready = self._blocks.next_block()
        quantized, report = self._ready[name]
        return quantized, {
            "solver": "gptq",
            "output_error": float(f"{report.output_error:.4g}"),
            "damping": report.damping,
            "dead_columns": report.dead_columns,
        }
