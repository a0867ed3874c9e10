"""What runtimes do to the inputs of quantized linears: which types they round them to, by scheme,
and how.

Sources: vLLM 0.32's `CompressedTensorsConfig`, which maps schemes and types to kernels; its kernels
round each token's inputs to the type's largest value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from quantkit.tensors.late import torch
from quantkit.tensors.scheme import FP8, FP8_BLOCK, MXFP4, TILE, QuantScheme

ActivationsName = Literal["none", "int8", "fp8"]
"""The values of `Activations`, spelled out for editors and type checkers."""


class Activations(StrEnum):
    """The type that the inputs of quantized linears are rounded to."""

    NONE = "none"  # they stay floats
    INT8 = "int8"
    FP8 = "fp8"  # float8 e4m3

    @staticmethod
    def of(scheme: QuantScheme) -> tuple[Activations, ...]:
        """List the types that runtimes combine with a scheme, its default first."""
        none, int8, fp8 = Activations
        if scheme.of_small_floats:
            if scheme in (FP8, FP8_BLOCK):
                return (fp8, none)
            if scheme == MXFP4:
                return (none, fp8)
            return (none,)
        if scheme == QuantScheme(8, None):
            return none, int8
        if scheme.bits == 8 or scheme.group_size is None or not scheme.symmetric:
            return (none,)
        if scheme.group_size == _CUTLASS_GROUP:
            return (none, int8, fp8)
        return (none, int8)


# The only group size of vLLM's W4A8 kernels with float8 inputs.
_CUTLASS_GROUP = 128
# The largest values of int8, without -128, which has no positive counterpart, and of float8 e4m3.
_LARGEST = {"int": 127.0, "float": 448.0}


@dataclass(frozen=True)
class InputRounding:
    """How inputs are rounded, symmetrically, with scales that are computed when a model runs.

    Attributes:
        type: ``int`` or ``float``, of 8 bits.
        group_size: inputs of a token that share a scale; None is all of them.
    """

    type: str
    group_size: int | None = None

    @classmethod
    def of(cls, activations: Activations, scheme: QuantScheme) -> InputRounding | None:
        """Choose the rounding for linears in a scheme; None for floats."""
        if activations is Activations.NONE:
            return None
        group_size = TILE if scheme == FP8_BLOCK else None
        if activations is Activations.INT8:
            return cls("int", group_size)
        return cls("float", group_size)

    @property
    def activations(self) -> Activations:
        """Return the type, by its name."""
        if self.type == "int":
            return Activations.INT8
        return Activations.FP8

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Round inputs [..., I] in float32."""
        if self.group_size is None:
            grouped = x
        else:
            grouped = torch.unflatten(x, -1, (-1, self.group_size))
        largest = _LARGEST[self.type]
        scale = grouped.abs().amax(-1, keepdim=True) / largest
        # A group of zeros has the scale 0, by which nothing can be divided.
        steps = grouped / torch.where(scale > 0, scale, 1.0)
        if self.type == "int":
            codes = steps.round()
        else:
            codes = steps.to(torch.float8_e4m3fn).float()
        return (codes * scale).view_as(x)
