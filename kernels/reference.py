"""The reference backend: dequantize as `QuantTensor` defines it, multiply in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.backend import Operations, Rounding
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

OAI_ALPHA = 1.702
"""gpt-oss's factor on a gate before its sigmoid; compiled kernels know no other."""


class ReferenceBackend:
    """Correct everywhere and slow; other backends are tested against it."""

    name = "reference"

    def unsupported_reason(self, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
        return None if dtype.is_floating_point else f"activations are {dtype}"

    def rounding(self, dtype: torch.dtype) -> Rounding:
        return Rounding(0, 0)

    def prepare(self, weight: QuantTensor) -> dict[str, Tensor]:
        zero = {} if weight.zero is None else {"zero": weight.zero}
        return {"codes": weight.codes, "scale": weight.scale, **zero}

    def operations(self) -> Operations | None:
        return None

    def rows(self, prepared: dict[str, Tensor], scheme: QuantScheme, columns: int, index: Tensor) -> Tensor:
        return QuantTensor(prepared["codes"], prepared["scale"], prepared.get("zero"), scheme).take(index).dequantize()

    def linear(
        self, x: Tensor, prepared: dict[str, Tensor], scheme: QuantScheme, rows: int, bias: Tensor | None
    ) -> Tensor:
        weight = QuantTensor(prepared["codes"], prepared["scale"], prepared.get("zero"), scheme)
        product = F.linear(x.float(), weight.dequantize(), None if bias is None else bias.float())
        return product.to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str, limit: float | None, alpha: float = OAI_ALPHA) -> Tensor:
    """The product of an activated gate and `up`, [..., F] each; it may reuse their memory."""
    if activation == "silu":
        return F.silu(gate, inplace=not gate.requires_grad).mul_(up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    assert activation == "swiglu_oai", activation
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


REFERENCE = ReferenceBackend()
