"""The float32 of NVFP4's scales, which linears share that runtimes multiply as one: vLLM has one
for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.load import floats_of
from quantkit.tensors.float_codes import outer_scale
from quantkit.tensors.scheme import QuantScheme, Scales

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""The last part of the names of linears that are fused."""


class SharedScales:
    """Outer scales by name of the linear, each found from the source's weights when it is
    needed.
    """

    def __init__(self, source: Checkpoint, schemes: Mapping[str, QuantScheme]) -> None:
        """`schemes` are by module."""
        self._source = source
        self._nested = {
            module for module, scheme in schemes.items() if scheme.scales is Scales.NESTED
        }
        self._scales_by_modules: dict[tuple[str, ...], Tensor] = {}

    def of(self, module: str) -> Tensor | None:
        """Float32 [1]; None for a linear of another scheme."""
        if module not in self._nested:
            return None
        prefix, dot, leaf = module.rpartition(".")
        fused = next((names for names in _FUSED if leaf in names), (leaf,))
        modules = tuple(one for name in fused if (one := f"{prefix}{dot}{name}") in self._nested)
        if modules not in self._scales_by_modules:
            scales = [outer_scale(floats_of(self._source.load(f"{one}.weight"))) for one in modules]
            # That of the largest weight.
            self._scales_by_modules[modules] = torch.stack(scales).amin(0)
        return self._scales_by_modules[modules]
