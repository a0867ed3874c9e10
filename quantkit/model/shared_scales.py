"""Compute the outer float32 scales of NVFP4. Linears that runtimes fuse share one: vLLM has a
single outer scale for a fused linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.load import narrow_to_floats
from quantkit.tensors.float_codes import outer_scale
from quantkit.tensors.scheme import QuantScheme, Scales

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""The last parts of the names of linears that runtimes fuse."""


class SharedScales:
    """Outer scales by the name of the linear, each computed from the source's weights when it is
    first needed.
    """

    def __init__(self, source: Checkpoint, schemes: Mapping[str, QuantScheme]) -> None:
        """Select the linears with nested scales; `schemes` are by module."""
        self._source = source
        self._nested = {
            module for module, scheme in schemes.items() if scheme.scales is Scales.NESTED
        }
        self._scales_by_modules: dict[tuple[str, ...], Tensor] = {}

    def of(self, module: str) -> Tensor | None:
        """Compute the outer scale of a linear, float32 [1]; None if its scheme has none."""
        if module not in self._nested:
            return None
        prefix, dot, leaf = module.rpartition(".")
        siblings = [f"{prefix}{dot}{name}" for name in _find_fused_names(leaf)]
        # Fused linears may have different schemes; only those with nested scales share one.
        modules = tuple(sibling for sibling in siblings if sibling in self._nested)
        if modules not in self._scales_by_modules:
            scales: list[Tensor] = []
            for name in modules:
                scales.append(outer_scale(narrow_to_floats(self._source.load(f"{name}.weight"))))
            # An outer scale is inverse to the largest weight, so the smallest one suits all.
            self._scales_by_modules[modules] = torch.stack(scales).amin(0)
        return self._scales_by_modules[modules]


def _find_fused_names(leaf: str) -> tuple[str, ...]:
    """Find the last parts of the names of the linears that are fused with one."""
    for names in _FUSED:
        if leaf in names:
            return names
    return (leaf,)
